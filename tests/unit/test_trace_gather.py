"""Several ranks: whose trace it is, and whether the files belong together."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.trace import gather
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.identity import rank_in_name

from .kineto import Recording, training


def folder_of(tmp_path, ranks=3, **settings):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(ranks):
        made, _ = training(rank, rank=rank, world_size=ranks, **settings)
        made.write(folder / f"{chr(ord('z') - rank)}.pt.trace.json.gz")
    return folder


def codes(found):
    return {warning.code: warning.count for warning in found.warnings}


def test_a_folder_of_ranks(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "notes.txt").write_text("x")
    (folder / ".hidden.json").write_text("x")
    (folder / "deeper").mkdir()
    told = []
    found = read_ranks([folder], progress=lambda done, total: told.append((done, total)))
    assert [split.rank for split in found.ranks] == [0, 1, 2]
    assert (found.world_size, codes(found)) == (3, {})
    assert told
    assert all(0 <= done <= total for done, total in told)


def test_files_given_twice_count_once(tmp_path):
    folder = folder_of(tmp_path)
    first = next(folder.iterdir())
    assert len(read_ranks([folder, first, folder / "deeper" / ".." / first.name][:2]).ranks) == 3


def test_parallel_is_the_same_as_serial(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, ranks=2)
    serial = read_ranks([folder])
    monkeypatch.setattr(gather, "_PARALLEL_FROM_BYTES", 0)
    parallel = read_ranks([folder], jobs=2, progress=lambda *_: None)
    assert [split.total for split in parallel.ranks] == [split.total for split in serial.ranks]
    # An error of another process is the same one line as here.
    (folder / "broken.json").write_text('{"traceEvents": [')
    with pytest.raises(InputError, match=r"broken\.json is cut") as caught:
        read_ranks([folder], jobs=2)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_process_that_is_killed_is_an_error_of_two_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "_PARALLEL_FROM_BYTES", 0)
    paths = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for path in paths:
        os.mkfifo(path)
    before = set(multiprocessing.active_children())

    def kill():
        # Opening waits until the process that reads has got there.
        with paths[0].open("wb"), paths[1].open("wb"):
            victim = next(iter(set(multiprocessing.active_children()) - before))
            os.kill(victim.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(InputError, match="was killed") as caught:
        read_ranks(paths, jobs=2)
    killer.join()
    assert "--jobs 1" in caught.value.remedy


def test_json_that_is_no_trace_is_passed_in_folders_only(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "settings.json").write_text('{"lr": 0.1}')
    found = read_ranks([folder])
    assert (len(found.ranks), codes(found)) == (3, {"not_a_trace": 1})
    with pytest.raises(InputError, match="holds no traceEvents"):
        read_ranks([folder / "settings.json"])
    for file in folder.glob("*.gz"):
        file.unlink()
    with pytest.raises(InputError, match="holds no traceEvents"):
        read_ranks([folder])


@pytest.mark.parametrize("text", ["[1, 2]", "[]", '["a", {}]'.replace("{}", "[]")])
def test_a_list_of_something_else_is_no_trace(text, tmp_path):
    folder = folder_of(tmp_path)
    (folder / "more.json").write_text(text)
    assert codes(read_ranks([folder]))["not_a_trace"] == 1
    with pytest.raises(InputError, match="a JSON list, but not of events"):
        read_ranks([folder / "more.json"])


def test_a_folder_without_traces(tmp_path):
    with pytest.raises(InputError, match=r"holds no \*\.json"):
        read_ranks([tmp_path])


def test_missing_ranks_are_named(tmp_path):
    folder = folder_of(tmp_path, ranks=5)
    for name in "yw":
        (folder / f"{name}.pt.trace.json.gz").unlink()
    found = read_ranks([folder])
    assert codes(found) == {"missing_ranks": 2}
    assert "Ranks 1, 3." in found.warnings[0].message


def test_one_rank_alone_cannot_tell_waiting(tmp_path):
    folder = folder_of(tmp_path)
    found = read_ranks([folder / "y.pt.trace.json.gz"])
    assert codes(found) == {"single_rank": 1}
    assert "rank 1 of 3" in found.warnings[0].message


# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank0.json", 0),
        ("trace_rank_12.json.gz", 12),
        ("Rank-3.json", 3),
        ("worker7_step_12.1694128201557.pt.trace.json.gz", 7),
        ("small_rank1_of_2.json.gz", 1),
        ("rank=5.json", 5),
        ("no_rank.json", None),
        ("step_12.json", None),
        ("rank0_worker1.json", None),
        ("rank0_rank0.json", None),
        ("ranks0-3.json", None),
        ("rank0-3.json", None),
        ("frank7.json", None),
        ("host_4711.1694128201557.pt.trace.json", None),
    ],
)
def test_ranks_in_names(name, rank):
    assert rank_in_name(Path("rank9") / name) == rank


def nameless(tmp_path, name="t.json", **settings):
    made, _ = training(1, **{"rank": None, "world_size": None, "backend": None, **settings})
    return made.write(tmp_path / name)


def test_a_rank_is_stated_or_named_never_guessed(tmp_path):
    path = nameless(tmp_path)
    with pytest.raises(InputError, match="does not say which rank") as caught:
        read_ranks([path])
    assert str(path) in caught.value.message
    assert "--rank" in caught.value.remedy
    assert read_ranks([path], rank=4).ranks[0].rank == 4
    found = read_ranks([nameless(tmp_path, "rank6.json")])
    assert found.ranks[0].rank == 6
    assert codes(found)["rank_from_name"] == 1
    # The file goes before its name.
    assert read_ranks([nameless(tmp_path, "rank7.json", rank=1, world_size=2)]).ranks[0].rank == 1


def test_a_stated_rank_must_fit(tmp_path):
    path = nameless(tmp_path, rank=1, world_size=2)
    with pytest.raises(InputError, match="says it is rank 1, not 0"):
        read_ranks([path], rank=0)
    with pytest.raises(UsageError, match="there are 2"):
        read_ranks([path, nameless(tmp_path, "u.json")], rank=0)
    with pytest.raises(InputError, match="of rank 5, but its world size is 2"):
        read_ranks([nameless(tmp_path, "v.json", world_size=2)], rank=5)


def two(tmp_path, one, other):
    paths = []
    for name, settings in (("a.json", one), ("b.json", other)):
        made, _ = training(1, **{"rank": int(name == "b.json"), **settings})
        paths.append(made.write(tmp_path / name))
    return paths


HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({}, {"rank": 0}, "Rank 0 is in two files: .*a.json and .*b.json"),
        ({"world_size": 2}, {"world_size": 4}, "different runs: their world sizes are 2 and 4"),
        ({"backend": "nccl"}, {"backend": "gloo"}, "different runs: their backends are"),
        ({}, {"base_ns": 1_699_999_999_000_000_000}, "different clocks: only .*b.json has base"),
        (
            {},
            {"origin_ns": Recording.origin_ns + 2 * HOUR_NS},
            "different runs: they were recorded 2.0 hours apart",
        ),
    ],
)
def test_files_that_do_not_belong_together(one, other, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        read_ranks(two(tmp_path, one, other))
    assert caught.value.remedy
    assert len(str(caught.value).splitlines()) == 2


def test_clocks_of_hosts_may_be_apart(tmp_path):
    shifted = {"origin_ns": Recording.origin_ns + 11_560_000_000}
    assert len(read_ranks(two(tmp_path, {}, shifted)).ranks) == 2


def test_bases_may_differ(tmp_path):
    base = {"base_ns": Recording.origin_ns - 10**9}
    other = {"base_ns": Recording.origin_ns - 2 * 10**9}
    assert len(read_ranks(two(tmp_path, base, other)).ranks) == 2


def test_recordings_of_other_steps(tmp_path):
    paths = two(tmp_path, {}, {})
    text = paths[1].read_text()
    paths[1].write_text(text.replace("ProfilerStep#", "ProfilerStep#5"))
    with pytest.raises(InputError, match="have no step in common"):
        read_ranks(paths)


def test_a_trace_without_a_usable_time_says_so(tmp_path):
    made = Recording()
    made.kernel(0, 10)
    for event in made.events:
        event["ts"] = 0
    path = made.write(tmp_path / "t.json")
    with pytest.raises(InputError, match=r"no GPU work .* usable times: 1 rows .* at time 0"):
        read_ranks([path])


def test_a_trace_of_nothing(tmp_path):
    made = Recording()
    made.step(0, 0, 100)
    made.event("cpu_op", "aten::add", 5, 5)
    with pytest.raises(InputError, match="neither GPU work nor collectives of gloo") as caught:
        read_ranks([made.write(tmp_path / "t.json")])
    assert "ProfilerActivity.CUDA" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("job-worker-0_1234.1699.pt.trace.json", None),
        ("worker-3_77.1699.pt.trace.json.gz", None),
        ("job-worker-0.job.svc_1234.1699.pt.trace.json", None),
        ("job-worker-1-x7f_1234.1699.pt.trace.json", None),
        ("worker3_step_12.1694128201557.pt.trace.json.gz", 3),
        ("worker3.1694128201557.pt.trace.json", 3),
        ("rank3_1234.1699.pt.trace.json", 3),
    ],
)
def test_a_hosts_name_is_no_rank(name, rank):
    """torch.profiler names a file by host, process and time; pods of a job are called worker-N."""
    assert rank_in_name(Path(name)) == rank
