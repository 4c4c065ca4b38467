"""Collecting over a real process group: whole files come, a rank that is lost is named."""

import json
import random

import pytest

from ddp_profiler.measure.collect import CHUNK_BYTES
from ddp_profiler.record import paths
from tests.integration.collect_case import TIMEOUT_S
from tests.integration.conftest import ROOT, torchrun

# Its short time-outs are no place for others.
pytestmark = [pytest.mark.distributed, pytest.mark.alone]


@pytest.mark.parametrize(("how", "group"), [("dies", "own"), ("stalls", "session's")])
def test_whole_file_comes_and_a_lost_rank_ends_the_wait(tmp_path, how, group):
    contents = {rank: random.Random(rank).randbytes(2 * CHUNK_BYTES + 12_345) for rank in (1, 2)}
    for folder in "01":
        (tmp_path / folder).mkdir()
    for rank, data in contents.items():
        paths.rank_file(tmp_path / "1", rank).write_bytes(data)
    done = torchrun(4, "-m", "tests.integration.collect_case", tmp_path, how, group, cwd=ROOT)
    assert done.code == 0, done.err[-3000:]
    failed, seconds = json.loads((tmp_path / "result.json").read_text())
    assert list(failed) == ["2"]
    assert failed["2"].startswith("the connection was lost: ")
    assert seconds < 2 * TIMEOUT_S + 10
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["rank-00001.arrows"]
    assert paths.rank_file(tmp_path / "0", 1).read_bytes() == contents[1]
    assert paths.rank_file(tmp_path / "1", 2).read_bytes() == contents[2]
