"""A folder is given back as long as nothing was recorded in it."""

import pytest

from ddp_profiler.keeper import RunKeeper
from ddp_profiler.record import paths
from tests.unit.test_record import run_info


@pytest.mark.parametrize("recorded", [False, True])
def test_release(tmp_path, recorded):
    folder = tmp_path / "run"
    keeper = RunKeeper(0)
    keeper.claim(folder, run_info())
    if recorded:
        paths.rank_file(folder, 1).touch()
    assert keeper.release() is not recorded
    assert paths.run_file(folder).exists() is recorded
    keeper.update(status="failed")
    assert paths.run_file(folder).exists() is recorded


def test_a_rank_without_a_folder_has_nothing_to_give_back():
    assert RunKeeper(1).release()
