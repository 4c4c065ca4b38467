"""A rank hangs: the run ends by --timeout, with a table of each rank's last phase and step."""

import re
from pathlib import Path

import pytest

from tests.faults.conftest import TIMEOUT_S, check_end, check_kept, faultkit, study

pytestmark = pytest.mark.distributed

ROOM_S = 45
"""For start-up, the report and a busy machine."""


def table(text):
    """Returns the lines of the table of ranks, by rank."""
    rows = text.split("what each rank was doing:")[1].splitlines()
    return {int(row.split()[0]): row for row in rows if re.match(r"\s+\d+\s", row)}


def test_a_stopped_rank(tmp_path):
    folder = tmp_path / "run"
    ended = study(folder, "--plant", "fate=STOP,rank=1,phase=instrumented")
    check_end(ended)
    assert ended.seconds < TIMEOUT_S + ROOM_S
    assert "rank 1 " in ended.ours
    assert "was stopped and did not go on" in ended.ours
    rows = table(ended.ours)
    assert "instrumented block" in rows[0]
    assert "step" in rows[0]
    assert "failed first (SIGSTOP)" in rows[1]
    kept = faultkit.kept(folder)
    check_kept(kept)
    assert kept.info["failures"][0]["rank"] == 1


@pytest.mark.parametrize("how", ["loop", "unequal", "skip"])
def test_a_rank_that_takes_no_part(tmp_path, how):
    folder = tmp_path / "run"
    here = Path(__file__).parent
    ended = study(folder, model="hanging:make", cwd=here, env={"HANG": how})
    check_end(ended)
    assert ended.seconds < TIMEOUT_S + ROOM_S
    rows = table(ended.ours)
    assert sorted(rows) == [0, 1]
    assert all("level dp2, " in row for row in rows.values())
    assert all(re.search(r"step \d+", row) for row in rows.values()), rows
    if how == "loop":
        assert "alive, at hanging.py:" in rows[1]
        assert "in endless" in rows[1]
    check_kept(faultkit.kept(folder))
