"""The merged timeline: valid, aligned, its tracks hold the parts, and it stays small."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.trace.across import compare
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.timeline import check_target, write_timeline

from .kineto import ALL_REDUCE, Recording
from .traced_job import Call, make_job

OFFSETS = {1: 11_560_000_000, 3: -70_001}


def written(job_or_made, tmp_path, name="t.json.gz", **how):
    folder = tmp_path / "job"
    if isinstance(job_or_made, Recording):
        folder.mkdir()
        job_or_made.write(folder / "t.json")
    else:
        job_or_made.write(folder)
    found = read_ranks([folder])
    across = compare(found.ranks)
    made = write_timeline(tmp_path / name, found.ranks, across, **how)
    data = (tmp_path / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    return found, across, made, json.loads(text.decode("ascii"))


def tracks(content):
    """Slices as (name, begin, end) in ns by (rank, name of the track)."""
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in content["traceEvents"]
        if e["name"] == "thread_name"
    }
    result = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            key = (event["pid"], names[event["pid"], event["tid"]])
            result[key].append((event["name"], begin, begin + length))
    return result


@pytest.mark.parametrize("name", ["t.json.gz", "t.json"])
def test_tracks_hold_the_parts_on_one_clock(name, tmp_path):
    job = make_job(3, offsets=OFFSETS)
    found, across, made, content = written(job, tmp_path, name)
    assert across.refused == ""
    by_track = tracks(content)
    processes = {
        e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"
    }
    assert processes == {rank: f"rank {rank}" for rank in range(4)}
    events = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert len(events) == made.events
    assert {e["ph"] for e in content["traceEvents"]} == {"X", "M"}
    assert min(e["ts"] for e in events) == 0
    assert (made.left_out, made.closed_gap_ns) == (0, 0)
    for split in found.ranks:
        rank, total = split.rank, split.total

        def length(track, start="", rank=rank):
            return sum(e - b for n, b, e in by_track[rank, track] if n.startswith(start))

        assert length("compute") == total.compute_ns
        # Also before the first work and after the last.
        assert length("idle") == total.idle_ns
        assert length("exposed communication") == total.exposed_comm_ns
        waiting = across.waiting_total[rank]
        assert length("exposed communication", "exposed wait") == waiting.exposed_wait_ns
        assert length("exposed communication", "exposed transfer") == waiting.exposed_transfer_ns
        assert length("AllReduce", "AllReduce wait") == waiting.wait_ns
        assert length("AllReduce", "AllReduce transfer") == waiting.transfer_ns
        assert [n for n, _, _ in by_track[rank, "steps"]] == ["step 0", "step 1", "step 2"]
    # All transfers of a collective begin and end at the same time on all ranks.
    transfers = [
        sorted((b, e) for n, b, e in by_track[rank, "AllReduce"] if n.endswith("transfer"))
        for rank in range(4)
    ]
    assert transfers[0] == transfers[1] == transfers[2] == transfers[3]
    assert len(transfers[0]) == 9


def test_slices_of_a_track_never_overlap(tmp_path):
    made = Recording(world_size=1)
    for place in range(20):
        made.comm(place * 100, 350, stream=20 + place % 4)
        made.comm(place * 100 + 10, 30, "ncclDevKernel_AllGather_RING_LL", stream=30)
    _, _, _, content = written(made, tmp_path)
    by_track = tracks(content)
    assert {track for _, track in by_track} >= {"AllReduce", "AllReduce 4", "AllGather"}
    for slices in by_track.values():
        spans = sorted((b, e) for _, b, e in slices)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert sum(len(v) for (_, t), v in by_track.items() if t.startswith("AllReduce")) == 20


@pytest.mark.parametrize("most", [10**6, 200, 90])
def test_slices_of_a_track_never_overlap_once_it_is_thinned(most, tmp_path, monkeypatch):
    """Waits, transfers and what is neither share a track; so do waits and transfers by kind."""
    from ddp_profiler.trace import timeline

    monkeypatch.setattr(timeline, "_LEAST_OF_RANK", 9)
    script = [Call(), Call(), Call("Broadcast", group="1", members=(0,)), Call()]
    job = make_job(5, script=script, steps=12, offsets=OFFSETS)
    found, across, made, content = written(job, tmp_path, most=4 * most)
    assert made.events <= 4 * most
    for slices in tracks(content).values():
        spans = sorted((b, e) for _, b, e in slices)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    exposed = tracks(content)[0, "exposed communication"]
    if most < 10**6:
        assert made.closed_gap_ns
        # What was put together says how much of each it holds.
        told = {"exposed_transfer_us": 0.0, "exposed_communication_us": 0.0, "exposed_wait_us": 0.0}
        for event in content["traceEvents"]:
            if event["pid"] == 0 and event["ph"] == "X" and event["tid"] == 3:
                for name in event.get("args", {}):
                    told[name] += event["args"][name]
        assert told["exposed_transfer_us"]
        assert told["exposed_wait_us"]
        assert sum(told.values()) * 1000 <= found.ranks[0].total.exposed_comm_ns + 1
        return
    # What was not compared is neither waiting nor transfer, and hides none of either.
    waiting = across.waiting_total[0]
    lengths = defaultdict(int)
    for name, begin, end in exposed:
        lengths[name] += end - begin
    assert lengths == {
        "exposed wait": waiting.exposed_wait_ns,
        "exposed transfer": waiting.exposed_transfer_ns,
        "exposed communication": waiting.exposed_untold_ns,
    }
    assert waiting.exposed_untold_ns > 0


def test_an_exposed_wait_ends_where_what_is_not_compared_begins(tmp_path):
    """A wait of one collective, and all the while another one that was not compared."""
    made = make_job(lag=lambda step, place, rank: 400_000 * (rank == 1), world=2, script=[Call()])
    waits = [(met.begin[0], met.begin[1]) for met in made.met]
    for begin, end in waits:
        # Only rank 0 has them, from within the wait until after its end.
        made.recordings[0].comm(begin + 300_000, end - begin, stream=50)
    made.recordings[0].events = [e for e in made.recordings[0].events if "sgemm" not in e["name"]]
    _, across, _, content = written(made, tmp_path)
    exposed = tracks(content)[0, "exposed communication"]
    got = [(b, e) for name, b, e in sorted(exposed, key=lambda one: one[1]) if "wait" in name]
    assert [end - begin for begin, end in got] == [300_000] * len(waits)
    assert across.waiting_total[0].exposed_wait_ns == 300_000 * len(waits)


@pytest.mark.parametrize("most", [10**6, 20])
def test_steps_do_not_overlap_whatever_their_annotations_do(most, tmp_path, monkeypatch):
    from ddp_profiler.trace import timeline

    monkeypatch.setattr(timeline, "_LEAST_OF_RANK", 20)
    made = Recording()
    for place in range(12):
        made.kernel(1000 * place + 10, 20, launched=1000 * place + 1)
        # Of two threads, each a little longer than until the next one.
        made.step(place % 6, 1000 * place, 1300, tid=1 + place % 2)
    _, _, _, content = written(made, tmp_path, most=most)
    slices = tracks(content)[0, "steps"]
    assert [slices[0][1], slices[-1][2]] == [0, 12_300]
    assert all(before[2] <= after[1] for before, after in pairwise(slices))
    if most > 20:
        assert [name for name, _, _ in slices[4:8]] == [
            "step 4",
            "step 5",
            "step 0 #2",
            "step 1 #2",
        ]


def test_memory_and_idling(tmp_path):
    made = Recording()
    made.step(7, 0, 10_000)
    made.kernel(0, 1000)
    made.copy(3000, 500)
    made.kernel(6000, 1000)
    _, _, _, content = written(made, tmp_path)
    by_track = tracks(content)
    assert by_track[0, "memory"] == [("memory", 3000, 3500)]
    assert by_track[0, "idle"] == [
        ("idle", 1000, 3000),
        ("idle", 3500, 6000),
        ("idle", 7000, 10_000),
    ]


def test_it_stays_small_and_says_what_was_left_out(tmp_path, monkeypatch):
    from ddp_profiler.trace import timeline

    monkeypatch.setattr(timeline, "_LEAST_OF_RANK", 90)
    made = Recording(world_size=1)
    for place in range(400):
        made.kernel(place * 1000, 500 + place)
        made.comm(place * 1000, 100 + place, ALL_REDUCE)
    _, _, result, content = written(made, tmp_path, most=90)
    assert result.left_out == 400 - 10
    # The longest collectives are kept.
    kept = [e - b for _, b, e in tracks(content)[0, "AllReduce"]]
    assert kept == list(range(490, 500))
    compute = tracks(content)[0, "compute"]
    assert len(compute) == 10
    # All but the nine longest gaps are closed; those between idling are kernels.
    assert result.closed_gap_ns == 500 + 389
    assert result.events <= 90
    steps = tracks(content)[0, "steps"]
    assert len(steps) <= 10
    assert steps[0][0].startswith("steps 0 to ")


def test_names_from_the_file_are_escaped(tmp_path):
    made = Recording()
    group = {"Process Group Name": 'a"b\\\x1b\n\u2028ü', "Group size": 2}
    made.comm(0, 100, ALL_REDUCE, **group)
    _, _, _, content = written(made, tmp_path)
    (event,) = (e for e in content["traceEvents"] if e["name"] == "AllReduce" and e["ph"] == "X")
    assert event["args"]["group"] == group["Process Group Name"]


def test_equal_timelines_are_equal_files(tmp_path):
    job = make_job(3)
    written(job, tmp_path, "a.json.gz")
    found = read_ranks([tmp_path / "job"])
    (tmp_path / "b").mkdir()
    write_timeline(tmp_path / "b" / "a.json.gz", found.ranks, compare(found.ranks))
    one = (tmp_path / "a.json.gz").read_bytes()
    other = (tmp_path / "b" / "a.json.gz").read_bytes()
    assert one == other
    # A clock that is off changes nothing in it.
    written(make_job(3, offsets={2: 5_000_000_000}), tmp_path, "c.json")
    assert (tmp_path / "c.json").read_bytes() == gzip.decompress(one)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t.txt", r"is a \.json or \.json\.gz"),
        ("there.json", "exists; it is not overwritten"),
        ("nowhere/t.json", "does not exist"),
        ("traces/t.json", "would lie among the traces"),
    ],
)
def test_targets_that_are_refused(name, message, tmp_path):
    (tmp_path / "traces").mkdir()
    (tmp_path / "there.json").write_text("x")
    with pytest.raises(UsageError, match=message) as caught:
        check_target(tmp_path / name, [tmp_path / "traces"])
    assert caught.value.remedy
    check_target(tmp_path / "fine.json.gz", [tmp_path / "traces"])


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    from ddp_profiler.trace import timeline

    found = read_ranks([make_job(1).write(tmp_path / "job")])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timeline, "_write", full)
    with pytest.raises(InputError, match=r"Cannot write .*No space left"):
        write_timeline(tmp_path / "t.json.gz", found.ranks, compare(found.ranks))
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
