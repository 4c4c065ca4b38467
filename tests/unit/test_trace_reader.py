"""What is read of a trace is the same in every form that traces have."""

import gzip
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from ddp_profiler.trace import kernels
from ddp_profiler.trace.columns import Column
from ddp_profiler.trace.kernels import Work
from ddp_profiler.trace.model import NO_KIND
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split

from .kineto import ALL_REDUCE, GEMM, Recording, dumps, number, training

DAY_NS = 86_400 * 10**9


def told(trace):
    """All that a trace tells, times absolute."""
    base = trace.base_time_ns or 0
    gpu, host = trace.gpu, trace.host_collectives
    return {
        "begin": (gpu.begin_ns[:] + base).tolist(),
        "end": (gpu.end_ns[:] + base).tolist(),
        "work": gpu.work.tolist(),
        "kind": gpu.kind.tolist(),
        "stream": gpu.stream.tolist(),
        "names": [trace.names[place] for place in gpu.name],
        "host": (host.begin_ns + base).tolist(),
        "launches": sorted((trace.launches.begin_ns[:] + base).tolist()),
        "marks": [(m.number, m.begin_ns + base, m.end_ns + base) for m in trace.marks],
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    made, _ = training(11)
    path = made.write(tmp_path_factory.mktemp("reference") / "t.json")
    return told(read_trace(path))


@pytest.mark.parametrize("base", [None, 1_699_999_999_000_000_000, 1_700_000_000_000_000_000 - 1])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("events_first", [False, True])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_forms_of_one_trace(base, indent, events_first, suffix, reference, tmp_path):
    made, _ = training(11, base_ns=base)
    path = made.write(tmp_path / f"t{suffix}", indent=indent, events_first=events_first)
    found = read_trace(path)
    assert told(found) == reference
    assert (found.rank, found.world_size, found.backend) == (0, 2, "nccl")
    assert (found.warnings, found.cut, found.base_time_ns) == ((), False, base)


def test_true_is_no_rank(tmp_path):
    made = Recording(rank=1, world_size=2)
    made.comm(0, 10)
    path = made.write(tmp_path / "t.json")
    assert read_trace(path).rank == 1
    path.write_text(re.sub(r'"rank": 1\b', '"rank": true', path.read_text()))
    assert read_trace(path).rank is None


def test_a_host_function_is_no_lost_kernel(tmp_path):
    made = Recording()
    made.step(0, 0, 1000)
    made.comm(100, 50, launched=10)
    made.launch(500, name="cudaLaunchHostFunc")
    found = split(read_trace(made.write(tmp_path / "t.json")), 0)
    assert found.steps[0].step.incomplete == ""


def test_a_list_has_no_metadata(reference, tmp_path):
    made, _ = training(11)
    found = read_trace(made.write(tmp_path / "t.json", as_list=True))
    assert told(found) == reference
    assert (found.rank, found.world_size, found.base_time_ns) == (None, None, None)


OLD = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "cuda_runtime": "Runtime",
    "user_annotation": "Operator",
    "cpu_op": "Operator",
}


def test_old_names_of_categories(reference, tmp_path):
    made, _ = training(11)
    for event in made.events:
        event["cat"] = OLD[event["cat"]]
    assert told(read_trace(made.write(tmp_path / "t.json"))) == reference


def test_order_of_keys_and_unknown_ones(reference, tmp_path):
    made, _ = training(11)
    draw = random.Random(1)
    for place, event in enumerate(made.events):
        items = [*event.items(), ("new", {"a": [1, {"b": 'x"},{"y'}]})]
        draw.shuffle(items)
        made.events[place] = dict(items)
    assert told(read_trace(made.write(tmp_path / "t.json"))) == reference


def test_fields_of_unusual_types(reference, tmp_path):
    made, _ = training(11)
    draw = random.Random(2)
    for event in made.events:
        if draw.random() < 0.3:
            event["ts"] = f'"{event["ts"]}"'.replace('"@@', "@@").replace('@@"', "@@")
            event["tid"] = [1]
            event["pid"] = str(event["pid"])
    made.events += [
        {"ph": "M", "name": None, "args": None, "pid": {"x": 1}},
        {"ph": "C", "cat": 3, "name": 4, "ts": [], "args": 5},
    ]
    text = dumps({"traceEvents": made.events}).encode()
    # Some times as strings, as some writers have them.
    places = range(0, len(text), 5000)
    for at in reversed(places):
        begin = text.find(b'"ts": 1', at)
        if begin >= 0:
            end = text.index(b",", begin)
            text = text[: begin + 6] + b'"' + text[begin + 6 : end] + b'"' + text[end:]
    path = tmp_path / "t.json"
    path.write_bytes(text)
    assert told(read_trace(path)) == reference


def test_numbers_of_unusual_types_in_arguments(tmp_path):
    made = Recording()
    made.kernel(0, 10, stream="7", correlation="12", launched=None)
    made.kernel(20, 10, stream=[1], correlation=2**64 - 1)
    made.kernel(40, 10, stream=3, correlation=5, device=1.0, **{"Collective name": 3})
    made.event("kernel", GEMM, 60, 10)["args"] = None
    del made.event("kernel", GEMM, 80, 10)["args"]
    found = read_trace(made.write(tmp_path / "t.json"))
    assert found.gpu.stream.tolist() == [7, -1, 3, -1, -1]
    assert found.gpu.correlation[:].tolist() == [12, -1, 5, -1, -1]


def test_rocm(tmp_path):
    made = Recording(backend="nccl")
    correlation = made.launch(0, name="hipLaunchKernel")
    made.kernel(100, 50, "Cijk_Ailk_Bljk_SB_MT128x128x8_SE", correlation=correlation)
    correlation = made.launch(10, name="hipExtLaunchKernel")
    made.comm(
        160, 70, "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        correlation=correlation, **{"Collective name": "_reduce_scatter_base"},
    )  # fmt: skip
    made.kernel(300, 5, "__amd_rocclr_copyBuffer.kd", correlation=made.launch(20))
    correlation = made.launch(30, name="hipMemcpyWithStream")
    made.kernel(310, 5, "CopyHostToDevice", category="gpu_memcpy", correlation=correlation)
    found = read_trace(made.write(tmp_path / "t.json"))
    assert found.gpu.work.tolist() == [
        Work.COMPUTE, Work.COMMUNICATION, Work.MEMORY, Work.MEMORY,
    ]  # fmt: skip
    kinds = [kernels.KINDS[kind] for kind in found.gpu.kind if kind != NO_KIND]
    assert kinds == ["ReduceScatter"]
    assert found.launches.begin_ns.size == 4


def test_sizes_types_and_groups_of_collectives(tmp_path):
    made = Recording()
    said = {
        "Collective name": "_allgather_base",
        "In msg nelems": 100,
        "Out msg nelems": 400,
        "Group size": 4,
        "dtype": "BFloat16",
        "Process Group Name": "3",
        "Process Group Description": "mesh_shard",
    }
    made.comm(0, 10, "ncclDevKernel_AllGather_RING_LL", **said)
    made.comm(20, 10, ALL_REDUCE)
    found = read_trace(made.write(tmp_path / "t.json"))
    assert found.gpu.elements_in.tolist() == [100, -1]
    assert found.gpu.elements_out.tolist() == [400, -1]
    (group,) = found.groups
    assert (group.name, group.size, group.label) == ("3", 4, "3 (mesh_shard)")
    assert found.gpu.group.tolist() == [0, -1]
    assert (found.dtypes, found.gpu.dtype.tolist()) == (("BFloat16",), [0, -1])


def test_collectives_on_the_cpu(tmp_path):
    made = Recording(backend="gloo")
    made.event(
        "user_annotation", "gloo:all_reduce", 10, 50, tid=5,
        **{"Input Dims": [[3, 4], [5], []], "Input type": ["float", "float", "Scalar"]},
    )  # fmt: skip
    made.event("cpu_op", "gloo:broadcast", 30, 50, tid=6)
    made.event("cpu_op", "c10d::allreduce_", 0, 5)
    found = read_trace(made.write(tmp_path / "t.json"))
    host = found.host_collectives
    assert [kernels.KINDS[kind] for kind in host.kind] == ["AllReduce", "Broadcast"]
    assert (host.elements.tolist(), host.thread.tolist()) == ([17, -1], [5, 6])
    assert found.distributed_calls == 1


IMPOSSIBLE = {
    "dropped_zero_time": {"ts": 0},
    "dropped_negative_duration": {"dur": -5},
    "dropped_absurd_duration": {"dur": 7_449_652_800_000_000},
    "dropped_unreadable_time": {"ts": 2**70},
    "dropped_absurd_time": {"ts": number(10**18)},
}


@pytest.mark.parametrize("code", IMPOSSIBLE)
@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op"])
@pytest.mark.parametrize("base", [None, 1_699_999_999_000_000_000])
def test_impossible_rows_are_left_out_and_counted(code, category, base, reference, tmp_path):
    made, _ = training(11, base_ns=base)
    for name in (ALL_REDUCE, GEMM):
        row = made.event(category, name, 5000, 400)
        row |= IMPOSSIBLE[code]
    made.events.reverse()
    found = read_trace(made.write(tmp_path / "t.json"))
    counted = {warning.code: warning.count for warning in found.warnings}
    # Rows of the CPU that nothing is taken from need no exact time.
    exempt = {"cpu_op": ("dropped_absurd_time", "dropped_unreadable_time")}
    exempt["cuda_runtime"] = ("dropped_absurd_time",)
    if code not in exempt.get(category, ()):
        assert counted == {code: 2}
    if category != "cuda_runtime":
        assert told(found) == reference


def test_negative_times_are_left_out(reference, tmp_path):
    made, _ = training(11)
    made.kernel(-made.origin_ns - 77, 10, ALL_REDUCE)
    found = read_trace(made.write(tmp_path / "t.json"))
    assert {w.code: w.count for w in found.warnings} == {"dropped_zero_time": 1}
    assert told(found) == reference


def test_rows_of_waiting_are_no_work(reference, tmp_path):
    made, _ = training(11)
    made.event("cuda_sync", "Stream Sync", 0, 10**9, pid=0, tid=7, stream=7, correlation=3)
    made.kernel(0, 10**9, "Event Sync")
    found = read_trace(made.write(tmp_path / "t.json"))
    assert {w.code: w.count for w in found.warnings} == {"sync_rows_ignored": 2}
    assert told(found) == reference


def test_digits_finer_than_ns_are_told(tmp_path):
    text = (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 5.0004, "dur": 1.5},'
        b'{"ph": "X", "cat": "kernel", "name": "b", "ts": 9999999999999.12345, "dur": 2}]}'
    )
    path = tmp_path / "t.json"
    path.write_bytes(text)
    found = read_trace(path)
    assert {w.code: w.count for w in found.warnings}["finer_than_ns"] == 2


def test_world_size_and_rank_of_wrong_types_are_not_believed(tmp_path):
    made = Recording(rank="3", world_size=-1)
    made.kernel(0, 10)
    found = read_trace(made.write(tmp_path / "t.json"))
    assert (found.rank, found.world_size) == (None, None)


def test_columns_give_back_what_they_took():
    draw = np.random.default_rng(4)
    column = Column()
    expected = []
    for span in (1, 200, 70_000, 2**33, 2**62):
        values = draw.integers(-span, span, 50)
        column.append(values)
        expected += values.tolist()
    column.append(np.array([], np.int64))
    assert len(column) == 250
    assert column.take().tolist() == expected
    assert len(column) == 0


PEAK = """
import resource, sys
from pathlib import Path
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split
read_trace(Path(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_rows_of_no_use(tmp_path):
    pytest.importorskip("resource")
    made, _ = training(1)
    peaks = []
    for copies in (1, 8):
        path = tmp_path / f"{copies}.json.gz"
        row = dumps({"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 5, "dur": 6,
                     "args": {"Call stack": "x" * 900}}).encode()  # fmt: skip
        begin, end = made.text().rsplit(b"]", 1)
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(begin)
            for _ in range(copies * 5):
                file.write((b"," + row) * 1500)
            file.write(b"]" + end)
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout))
    # 7.5 and 60 MB of text.
    assert peaks[1] < 1.1 * peaks[0] + 2000, peaks
