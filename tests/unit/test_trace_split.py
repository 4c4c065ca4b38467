"""Parts of steps: hand-computed cases, brute force, and what must not change them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_profiler.trace import intervals
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split
from ddp_profiler.trace.steps import StepSource

from .kineto import (
    ALL_GATHER,
    ALL_REDUCE,
    GEMM,
    NORM,
    PID,
    REDUCE_SCATTER,
    Recording,
    number,
    training,
)

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


def arrays(found):
    begin = np.array([begin for begin, _ in found], np.int64)
    return begin, begin + np.array([length for _, length in found], np.int64)


def cells(*spans):
    return {ns for begin, end in spans for ns in range(begin, end)}


@settings(deadline=None)
@given(INTERVALS, INTERVALS)
def test_intervals_match_counting(one, other):
    covered = [cells(*((b, b + n) for b, n in found)) for found in (one, other)]
    assert intervals.covered_ns(*arrays(one)) == len(covered[0])
    assert intervals.covered_ns(*arrays(one + other)) == len(covered[0] | covered[1])
    # Block by block, in any sizes.
    begin, end = arrays(sorted(one + other))
    for size in (1, 2, 5):
        cover = intervals.Cover()
        for at in range(0, begin.size, size):
            cover.add(begin[at : at + size], end[at : at + size])
        assert cover.covered_ns == len(covered[0] | covered[1])


def parts_of(made, tmp_path, rank=0):
    return split(read_trace(made.write(tmp_path / "t.json")), rank)


def codes(found):
    return {warning.code: warning.count for warning in found.warnings}


def figures(found):
    """All figures of all steps and of the whole."""
    return [found.total, *((s.step.number, s.parts) for s in found.steps)]


def test_a_step_by_hand(tmp_path):
    made = Recording()
    made.step(7, 0, 1000)
    made.copy(100, 50, launched=10)
    made.kernel(150, 200, GEMM, launched=20)
    made.comm(300, 100, ALL_REDUCE, launched=30, **{"In msg nelems": 10, "Out msg nelems": 10})
    made.comm(400, 150, ALL_GATHER, launched=40, stream=21)
    made.kernel(500, 100, NORM, launched=50)
    made.copy(590, 60, launched=60, stream=9)
    found = parts_of(made, tmp_path)
    (step,) = found.steps
    parts = step.parts
    assert (step.step.number, parts.window_ns) == (7, 1000)
    assert parts.compute_ns == 200 + 100
    assert parts.comm_ns == 250
    assert parts.overlap_ns == 50 + 50
    assert parts.exposed_comm_ns == 150
    assert parts.memory_ns == 50 + 60
    # 100..150 and 600..650.
    assert parts.exposed_memory_ns == 50 + 50
    assert parts.idle_ns == 1000 - 550
    assert parts.overlap_fraction == 100 / 250
    assert [(s.kind, s.count, s.comm_ns, s.exposed_ns, s.elements) for s in parts.by_kind] == [
        ("AllGather", 1, 150, 100, None),
        ("AllReduce", 1, 100, 50, 10),
    ]
    assert found.total == parts
    assert codes(found) == {}


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_match_counting(seed, tmp_path):
    made, truth = training(seed, steps=3)
    found = parts_of(made, tmp_path)
    assert found.step_source == StepSource.PROFILER_STEP
    for step, (compute, comm, memory) in zip(found.steps, truth, strict=True):
        marks = sorted({ns for span in (*compute, *comm, *memory) for ns in span})

        def length(*kinds, marks=marks):
            """Time in which at least one span of each kind runs, by cells between marks."""
            return sum(
                after - before
                for before, after in pairwise(marks)
                if all(any(b <= before and after <= e for b, e in kind) for kind in kinds)
            )

        parts = step.parts
        assert parts.compute_ns == length(compute)
        assert parts.comm_ns == length(comm)
        assert parts.overlap_ns == length(compute, comm)
        assert parts.memory_ns == length(memory)
        busy = length(compute + comm + memory)
        assert parts.exposed_memory_ns == busy - length(compute + comm)
        assert parts.window_ns == (
            parts.compute_ns + parts.exposed_comm_ns + parts.exposed_memory_ns + parts.idle_ns
        )
        assert parts.overlap_fraction == parts.overlap_ns / parts.comm_ns
    for name in ("compute_ns", "comm_ns", "overlap_ns"):
        assert getattr(found.total, name) == sum(getattr(s.parts, name) for s in found.steps)


def test_communication_is_unknown_where_no_kernel_is_known(tmp_path):
    made = Recording(world_size=8)
    for place in range(20):
        made.kernel(place * 100, 50)
        made.kernel(place * 100 + 50, 40, "my_lib_allreduce_sum(float*)")
    found = parts_of(made, tmp_path)
    assert (found.total.comm_ns, found.total.overlap_ns) == (None, None)
    assert codes(found)["no_collectives"] == 1
    (text,) = [one.message for one in found.warnings if one.code == "no_collectives"]
    assert "my_lib_allreduce_sum." in text
    # Of a job that nothing says to have other ranks it is unknown too, unless the CPU would say.
    made.world_size = None
    assert parts_of(made, tmp_path).total.comm_ns is None
    made.launch(0)
    assert parts_of(made, tmp_path).total.comm_ns == 0


# ----------------------------------------------------------------------------------------------
# Which step work belongs to


def ahead():
    """Two steps whose GPU work runs later than the CPU's annotation."""
    made = Recording()
    made.step(0, 0, 100)
    made.step(1, 100, 100)
    made.kernel(150, 100, launched=50)
    made.comm(260, 40, launched=60)
    made.kernel(310, 200, launched=110)
    made.comm(520, 80, launched=120)
    return made


def test_work_belongs_to_the_step_that_launched_it(tmp_path):
    found = parts_of(ahead(), tmp_path)
    assert [s.parts.compute_ns for s in found.steps] == [100, 200]
    assert [s.parts.comm_ns for s in found.steps] == [40, 80]
    # The second begins when the GPU is done with the first.
    assert [(s.window_begin_ns - s.step.begin_ns, s.parts.window_ns) for s in found.steps] == [
        (0, 300),
        (200, 300),
    ]
    assert found.collectives.step.tolist() == [0, 1]
    assert codes(found) == {}


def prefetching(steps=4):
    """Steps of 1000 ns on the GPU; a copy for each runs within the one before."""
    made = Recording()
    for step in range(steps):
        made.step(step, step * 100, 100)
        made.copy(1000 + step * 1000 - 700, 50, launched=step * 100 + 1, stream=9)
        made.kernel(1000 + step * 1000, 950, launched=step * 100 + 50)
        made.comm(1100 + step * 1000, 100, launched=step * 100 + 60)
    return made


def test_windows_do_not_overlap_and_work_of_others_is_not_idle(tmp_path):
    found = parts_of(prefetching(), tmp_path)
    windows = [(s.window_begin_ns, s.window_begin_ns + s.parts.window_ns) for s in found.steps]
    assert all(before[1] == after[0] for before, after in pairwise(windows))
    assert windows[-1][1] - windows[0][0] == found.total.window_ns
    for step in found.steps:
        parts = step.parts
        assert parts.window_ns + parts.outside_window_ns == (
            parts.compute_ns
            + parts.exposed_comm_ns
            + parts.exposed_memory_ns
            + parts.other_steps_ns
            + parts.idle_ns
        )
    # The first is 300..350 in its own window, the others lie within kernels of the step before.
    assert [s.parts.outside_window_ns for s in found.steps] == [0, 50, 50, 50]
    assert [s.parts.idle_ns for s in found.steps] == [300 + 650, 50, 50, 50]
    assert sum(s.parts.idle_ns for s in found.steps) == found.total.idle_ns
    assert codes(found) == {"steps_interleave": 3}


def test_what_runs_alone_for_another_step_is_told(tmp_path):
    made = Recording()
    made.step(0, 0, 1000)
    made.step(1, 1000, 1000)
    made.kernel(10, 300, launched=5)
    made.kernel(1500, 100, launched=20)
    made.kernel(1700, 200, launched=1010)
    first, second = parts_of(made, tmp_path).steps
    assert (first.parts.window_ns, first.parts.idle_ns) == (1600, 10 + 1190)
    assert (second.parts.window_ns, second.parts.idle_ns) == (400, 200)
    made.copy(400, 60, launched=1005, stream=9)
    first, second = parts_of(made, tmp_path).steps
    assert (first.parts.idle_ns, first.parts.other_steps_ns) == (1140, 60)
    assert (second.parts.idle_ns, second.parts.outside_window_ns) == (200, 60)


@settings(deadline=None)
@given(INTERVALS, st.lists(st.integers(-3, 80), max_size=6).map(sorted), st.integers(1, 5))
def test_cover_before_matches_counting(found, edges, size):
    begin, end = arrays(sorted(found))
    cover = intervals.CoverBefore(np.array(edges, np.int64))
    for at in range(0, begin.size, size):
        cover.add(begin[at : at + size], end[at : at + size])
    covered = cells(*((b, b + n) for b, n in found))
    assert cover.covered_ns.tolist() == [len({c for c in covered if c < edge}) for edge in edges]


def test_a_graph_launches_many_kernels_at_once(tmp_path):
    made = Recording()
    made.step(0, 0, 100)
    made.step(1, 100, 300)
    graph = made.launch(90, name="cudaGraphLaunch")
    for begin in (100, 120, 140):
        made.kernel(begin, 10, correlation=graph)
    made.kernel(200, 10, launched=110)
    found = parts_of(made, tmp_path)
    assert [s.parts.compute_ns for s in found.steps] == [30, 10]


def test_numbers_of_launches_may_repeat(tmp_path):
    made = Recording()
    made.step(0, 0, 100)
    made.step(1, 100, 100)
    for begin in (10, 110):
        made.correlation = 500
        made.kernel(begin + 5, 10 + begin // 10, correlation=made.launch(begin))
    found = parts_of(made, tmp_path)
    assert [s.parts.compute_ns for s in found.steps] == [11, 21]


def test_work_without_launches_goes_by_time(tmp_path):
    made = ahead()
    made.events = [event for event in made.events if event["cat"] != "cuda_runtime"]
    found = parts_of(made, tmp_path)
    assert codes(found) == {"assigned_by_time": 4}
    assert [s.parts.compute_ns for s in found.steps] == [0, 100]
    assert found.total.compute_ns == 300


def test_work_launched_before_the_recording_is_no_steps(tmp_path):
    made = ahead()
    made.kernel(20, 15, correlation=900)
    found = parts_of(made, tmp_path)
    assert codes(found) == {"launched_before_recording": 1, "steps_interleave": 1}
    # It is nobody's, but the GPU does not idle then.
    assert [s.parts.other_steps_ns for s in found.steps] == [15, 0]
    assert [s.parts.compute_ns for s in found.steps] == [100, 200]
    assert found.total.compute_ns == 315


def test_work_launched_between_steps_is_only_in_the_total(tmp_path):
    made = ahead()
    made.kernel(700, 15, launched=600)
    found = parts_of(made, tmp_path)
    assert codes(found) == {"outside_steps": 1}
    assert found.total.compute_ns == 315


# ----------------------------------------------------------------------------------------------
# Where steps come from


def test_annotations_on_the_gpu(tmp_path):
    made = ahead()
    for event in made.events:
        if event["name"].startswith("ProfilerStep"):
            event["cat"] = "gpu_user_annotation"
            event["ts"] = number(made.origin_ns + (150 if event["name"].endswith("0") else 310))
            event["dur"] = number(150 if event["name"].endswith("0") else 290)
    found = parts_of(made, tmp_path)
    assert found.step_source == StepSource.GPU_ANNOTATION
    assert [s.parts.comm_ns for s in found.steps] == [40, 80]


def test_calls_of_the_optimizer(tmp_path):
    made = Recording()
    for step in range(4):
        at = step * 1000
        made.kernel(at + 1500, 100 + step, launched=at + 100)
        made.event("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", at + 800, 50)
        made.event("user_annotation", "Optimizer.step#SGD.step", at + 900, 100)
    found = parts_of(made, tmp_path)
    assert found.step_source == StepSource.OPTIMIZER_STEP
    assert [s.parts.compute_ns for s in found.steps] == [100, 101, 102, 103, 0][: len(found.steps)]
    assert [bool(s.step.incomplete) for s in found.steps] == [True, False, False, False, True]
    assert codes(found)["steps_not_annotated"] == 1


def test_the_period_of_the_kernels(tmp_path):
    made = Recording()
    at = 0
    for step in range(5):
        for place, name in enumerate([GEMM, NORM, GEMM, NORM, GEMM, "adam", "adam"]):
            if (step, place) > (0, 2) and (step, place) < (4, 5):
                made.kernel(at, 10 + step, name)
                at += 20
        made.comm(at, 30, stream=20)
        at += 500
    found = parts_of(made, tmp_path)
    assert found.step_source == StepSource.GPU_PATTERN
    complete = [s for s in found.steps if not s.step.incomplete]
    assert [s.parts.compute_ns for s in complete] == [7 * 11, 7 * 12, 7 * 13]
    assert [s.parts.comm_ns for s in complete] == [30, 30, 30]
    assert found.steps[0].step.incomplete
    assert found.steps[-1].step.incomplete
    assert sum(s.parts.comm_ns for s in found.steps) == 150


def test_kernels_without_a_period_have_no_steps(tmp_path):
    made = Recording()
    for place, name in enumerate("abcdaefgbhijkcalmn"):
        made.kernel(place * 100, 10, name)
    found = parts_of(made, tmp_path)
    assert (found.step_source, found.steps) == (StepSource.NONE, ())
    assert set(codes(found)) == {"steps_not_annotated", "no_steps", "no_collectives"}
    assert found.total.compute_ns == 180


def steady(steps=5, **missing):
    made = Recording()
    for step in range(steps):
        at = step * 10_000
        made.step(step, at, 10_000)
        for place in range(10):
            launched = at + place * 500
            if missing.get(f"s{step}", 0) > place:
                made.launch(launched)
            else:
                made.kernel(launched + 4000, 300, launched=launched)
    return made


@pytest.mark.parametrize(("step", "name"), [(0, "first"), (4, "last")])
def test_lost_kernels_mark_a_step(step, name, tmp_path):
    found = parts_of(steady(**{f"s{step}": 3}), tmp_path)
    marked = [s.step.number for s in found.steps if s.step.incomplete]
    assert marked == [step], name
    assert "3 kernels were launched" in found.steps[step].step.incomplete
    assert codes(found) == {"incomplete_step": 1, "no_collectives": 1}


def test_fewer_work_or_a_short_annotation_mark_a_step(tmp_path):
    made = steady()
    made.events = [
        e for e in made.events if e.get("args", {}).get("correlation") not in range(1001, 1005)
    ]
    found = parts_of(made, tmp_path)
    assert "it has 6 pieces of GPU work, the others 10" in found.steps[0].step.incomplete
    made = steady()
    made.events[0] |= {"ts": number(made.origin_ns + 6000), "dur": number(4000)}
    for event in made.events[1:21]:
        if event["cat"] == "cuda_runtime":
            event["ts"] = number(made.origin_ns + 6001)
    found = parts_of(made, tmp_path)
    assert "annotation lasts" in found.steps[0].step.incomplete


def test_steady_steps_are_complete(tmp_path):
    found = parts_of(steady(), tmp_path)
    assert [s.step.incomplete for s in found.steps] == [""] * 5


def test_a_cut_file_marks_its_last_step(tmp_path):
    made = steady(3)
    made.events.sort(key=lambda event: event["cat"] != "user_annotation")
    path = made.write(tmp_path / "t.json")
    path.write_bytes(path.read_bytes()[:-200])
    found = split(read_trace(path, lenient=True), 0)
    assert found.steps[-1].step.incomplete == "the file is cut"


# ----------------------------------------------------------------------------------------------
# What is told where nothing applies


def without_kernels(world_size, calls=True):
    made = Recording(world_size=world_size)
    made.step(0, 0, 1000)
    made.kernel(100, 200, launched=10)
    if calls:
        made.event("cpu_op", "c10d::allreduce_", 50, 5)
        made.event("user_annotation", "nccl:all_reduce", 51, 3)
    return made


@pytest.mark.parametrize("world_size", [2, None])
def test_collectives_without_kernels_are_unknown_not_zero(world_size, tmp_path):
    found = parts_of(without_kernels(world_size), tmp_path)
    for parts in (found.total, found.steps[0].parts):
        assert (parts.comm_ns, parts.overlap_ns, parts.overlap_fraction) == (None, None, None)
        assert parts.compute_ns == 200
        assert parts.idle_ns == 800
    assert codes(found) == {"collectives_without_kernels": 1}


def test_at_world_size_1_communication_does_not_apply(tmp_path):
    found = parts_of(without_kernels(1), tmp_path)
    assert found.total.comm_ns is None
    assert codes(found) == {"single_process": 1}


def test_a_step_without_collectives_has_none_not_nothing(tmp_path):
    made = ahead()
    made.step(2, 1000, 100)
    made.kernel(1050, 20, launched=1010)
    found = parts_of(made, tmp_path)
    last = found.steps[2].parts
    assert (last.comm_ns, last.overlap_ns, last.overlap_fraction) == (0, 0, None)


def test_collectives_on_the_cpu(tmp_path):
    made = Recording(backend="gloo")
    made.step(0, 0, 1000)
    for begin, thread in ((100, 1), (150, 2), (400, 1)):
        made.event("user_annotation", "gloo:all_reduce", begin, 100, tid=thread)
    found = parts_of(made, tmp_path)
    parts = found.steps[0].parts
    assert not found.on_gpu
    assert (parts.comm_ns, parts.comm_sum_ns) == (250, 300)
    for name in ("compute_ns", "overlap_ns", "exposed_comm_ns", "idle_ns", "overlap_fraction"):
        assert getattr(parts, name) is None
    # Beside work of a GPU both are on one clock, and the overlap is known.
    made.kernel(120, 60, launched=10)
    parts = parts_of(made, tmp_path).steps[0].parts
    assert (parts.compute_ns, parts.overlap_ns) == (60, 60)


def test_a_kernel_library_that_does_not_say_which(tmp_path):
    made = Recording()
    made.comm(0, 100, "mscclKernel_Sum_half_Simple_false(ncclDevComm*)")
    found = parts_of(made, tmp_path)
    assert found.total.comm_ns == 100
    assert codes(found)["unknown_collective"] == 1


# ----------------------------------------------------------------------------------------------
# What must not change the figures


@pytest.fixture
def base(tmp_path):
    return parts_of(training(21)[0], tmp_path)


def test_lower_case_names_change_nothing(base, tmp_path):
    made, _ = training(21)
    for event in made.events:
        if event["cat"] == "kernel":
            event["name"] = event["name"].lower()
    assert figures(parts_of(made, tmp_path)) == figures(base)


def test_waiting_over_all_collectives_changes_only_a_count(base, tmp_path):
    made, _ = training(21)
    for event in list(made.events):
        if event["name"] == ALL_REDUCE:
            made.events.append({**event, "cat": "cuda_sync", "name": "Stream Wait Event"})
    found = parts_of(made, tmp_path)
    assert figures(found) == figures(base)
    assert set(codes(found)) == {"sync_rows_ignored"}


def test_annotations_of_collectives_change_nothing(base, tmp_path):
    made, _ = training(21)
    for event in list(made.events):
        if event["name"] == ALL_REDUCE:
            row = {**event, "cat": "gpu_user_annotation", "name": "nccl:all_reduce"}
            made.events.append({**row, "dur": number(10**9)})
    assert figures(parts_of(made, tmp_path)) == figures(base)


def test_a_shifted_clock_changes_nothing(base, tmp_path):
    made, _ = training(21, origin_ns=Recording.origin_ns + 11_560_000_000)
    found = parts_of(made, tmp_path)
    assert figures(found) == figures(base)


@pytest.mark.parametrize("kind", [ALL_REDUCE, GEMM])
def test_a_stretched_kernel_is_flagged(kind, base, tmp_path):
    assert "stretched_kernel" not in codes(base)
    made, _ = training(21)
    row = next(e for e in made.events if e["name"] == kind)
    row["dur"] = number(10 * 10**9)
    found = parts_of(made, tmp_path)
    assert codes(found)["stretched_kernel"] == 1
    (warning,) = (w for w in found.warnings if w.code == "stretched_kernel")
    assert "10000.0 ms on stream" in warning.message
    # Without any steps as well: the next kernel on the stream begins within it.
    made.events = [e for e in made.events if e["cat"] in ("kernel", "gpu_memcpy")]
    assert codes(parts_of(made, tmp_path))["stretched_kernel"] == 1


def test_sharded_training_is_split_by_kind_and_group(tmp_path):
    made = Recording(world_size=8)
    made.step(0, 0, 10_000)
    rows = (
        (ALL_GATHER, "shard", 0, 300),
        (REDUCE_SCATTER, "shard", 400, 500),
        (ALL_REDUCE, "replicate", 1000, 700),
        (ALL_GATHER, "shard", 2000, 100),
    )
    for name, group, begin, length in rows:
        made.comm(
            begin + 100, length, name, launched=begin,
            **{"Process Group Name": group, "Group size": 4},
        )  # fmt: skip
    made.kernel(500, 200, launched=50)
    found = parts_of(made, tmp_path)
    shares = {
        (s.kind.value, s.group): (s.count, s.comm_ns, s.exposed_ns) for s in found.total.by_kind
    }
    assert shares == {
        ("AllGather", "shard"): (2, 400, 400),
        ("ReduceScatter", "shard"): (1, 500, 300),
        ("AllReduce", "replicate"): (1, 700, 700),
    }
    order = list(
        zip(found.collectives.kind.tolist(), found.collectives.index.tolist(), strict=True)
    )
    assert [index for _, index in order] == [0, 0, 0, 1]


def test_pid_of_the_builder_is_one_process(tmp_path):
    assert {event["pid"] for event in training(1)[0].events} == {0, PID}
