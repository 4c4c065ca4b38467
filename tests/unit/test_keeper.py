"""A run's folder: given back while nothing is recorded in it, and written by one at a time."""

import signal
import threading

import pytest

from ddp_profiler.keeper import RunKeeper
from ddp_profiler.record import paths, reader, writer
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


def test_a_signal_that_comes_while_the_main_thread_writes_waits_for_the_lock(tmp_path, monkeypatch):
    keeper = RunKeeper(0)
    keeper.claim(tmp_path / "run", run_info())
    whole, seen = writer.write_run_info, []

    def write(folder, info):
        if not seen:
            seen.append("signal")
            signal.raise_signal(signal.SIGUSR1)
        whole(folder, info)

    def hold():
        # As what ends the process does, on another thread.
        ender = threading.Thread(target=keeper.update, kwargs={"status": "failed"}, daemon=True)
        ender.start()
        ender.join(10)
        seen.append("free" if not ender.is_alive() else "locked")

    monkeypatch.setattr(writer, "write_run_info", write)
    before = signal.signal(signal.SIGUSR1, lambda *_: keeper.defer(hold) or hold())
    try:
        keeper.update(status="complete")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["signal", "free"]
    assert reader.read_run_info(tmp_path / "run").status == "failed"
    # Once only, and not where nothing is written.
    keeper.update(status="complete")
    assert seen == ["signal", "free"]
    assert not keeper.defer(hold)


def test_another_threads_writing_does_not_put_a_signal_off(tmp_path, monkeypatch):
    keeper = RunKeeper(0)
    keeper.claim(tmp_path / "run", run_info())
    writes, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(writer, "write_run_info", lambda *_: (writes.set(), may_end.wait(10)))
    thread = threading.Thread(target=keeper.update, daemon=True)
    thread.start()
    assert writes.wait(10)
    assert not keeper.defer(may_end.set)
    may_end.set()
    thread.join()
