"""Real traces: what must come out was computed with plain interval arithmetic.

They are not part of the project. Without their folder these tests are skipped.
"""

import os
from pathlib import Path

import pytest

from ddp_profiler.errors import InputError
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.kernels import KINDS
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split

FOLDER = Path(
    os.environ.get("DDP_PROFILER_TRACES")
    or Path(__file__).resolve().parents[2].parent / "shared" / "traces"
)

pytestmark = pytest.mark.skipif(
    not (FOLDER / "INDEX.md").is_file(),
    reason=f"no real traces in {FOLDER}; DDP_PROFILER_TRACES names another folder",
)

US = 1000
MS = 1_000_000


def total(name, rank=None):
    (found,) = read_ranks([FOLDER / name], rank=rank).ranks
    return found


def codes(found):
    return {warning.code: warning.count for warning in found.warnings}


@pytest.fixture(scope="module")
def dlrm():
    return read_ranks([FOLDER / "dlrm_8_ranks"])


def durations(found, kind):
    chosen = found.collectives.kind == KINDS.index(kind)
    return (found.collectives.end_ns - found.collectives.begin_ns)[chosen] // US


def test_dlrm(dlrm):
    assert [found.rank for found in dlrm.ranks] == list(range(8))
    assert (dlrm.world_size, dlrm.warnings) == (8, ())
    overlaps = [found.total.overlap_fraction * 100 for found in dlrm.ranks]
    assert [round(percent, 2) for percent in overlaps] == [
        4.50, 2.47, 7.88, 3.31, 0.56, 0.64, 7.56, 9.51,
    ]  # fmt: skip
    assert [found.total.comm_ns for found in dlrm.ranks] == [
        us * US for us in (5798, 11336, 3492, 9774, 6587, 6251, 3558, 1746)
    ]
    assert [found.total.compute_ns for found in dlrm.ranks] == [
        us * US for us in (1034, 1246, 1068, 1240, 1126, 1041, 1051, 1059)
    ]
    for found in dlrm.ranks:
        (step,) = found.steps
        assert step.step.number == 10
        assert step.parts.comm_ns == found.total.comm_ns
        counts = {share.kind: share.count for share in found.total.by_kind}
        assert counts == {"AllReduce": 3, "SendRecv": 5}


def test_dlrm_collectives(dlrm):
    by_order = list(
        zip(*(durations(found, "AllReduce").tolist() for found in dlrm.ranks), strict=True)
    )
    assert by_order == [
        (246, 307, 198, 291, 95, 96, 213, 86),
        (601, 601, 572, 602, 70, 20, 602, 468),
        (952, 922, 915, 879, 69, 79, 920, 803),
    ]
    first = [durations(found, "SendRecv")[0] for found in dlrm.ranks]
    assert (first[7], first[1]) == (10, 7635)
    ends = [
        found.collectives.end_ns[found.collectives.kind == KINDS.index("AllReduce")] // US
        for found in dlrm.ranks
    ]
    apart = [max(end) - min(end) for end in zip(*(end.tolist() for end in ends), strict=True)]
    assert apart == [5, 5, 7]


def test_dlrm_work_launched_before_the_recording(dlrm):
    early = {found.rank: codes(found).get("launched_before_recording", 0) for found in dlrm.ranks}
    assert early == {rank: 64 if rank in (1, 3) else 0 for rank in range(8)}
    # Adam's kernels of the step before run within this one's time, but are not its own.
    assert dlrm.ranks[1].steps[0].parts.compute_ns == 1043 * US


def test_resnet50():
    found = total("resnet50_ddp_rank0_of_2.json.gz")
    counts = {share.kind: share.count for share in found.total.by_kind}
    assert counts == {"AllReduce": 15, "Broadcast": 6}
    figures = {
        step.step.number: tuple(
            round(ns / US)
            for ns in (step.parts.comm_ns, step.parts.overlap_ns, step.parts.exposed_comm_ns)
        )
        for step in found.steps
    }
    assert figures == {
        4: (11989, 1825, 10164),
        5: (12300, 1760, 10540),
        6: (22587, 3731, 18856),
    }
    assert round(found.total.comm_ns / US) in (46876, 46877)
    assert round(found.total.overlap_fraction * 100, 2) == 15.61
    for step in range(3):
        chosen = found.collectives.kind == KINDS.index("AllReduce")
        chosen &= found.collectives.step == step
        elements = found.collectives.elements[chosen].tolist()
        assert sorted(elements) == sorted([2049000, 7875584, 6563840, 6637568, 2431040])
        assert sum(elements) == 25557032
    warnings = {warning.code for warning in read_ranks([found.trace.path]).warnings}
    assert warnings == {"single_rank"}


def test_small_allreduces():
    found = total("small_allreduces_rank1_of_2.json.gz")
    assert (found.total.comm_ns, found.total.overlap_ns) == (357343 * US, 0)
    assert found.total.overlap_fraction == 0
    assert [share.count for share in found.total.by_kind] == [2020]
    assert [step.parts.by_kind[0].count for step in found.steps] == [404] * 5
    assert found.trace.num_events == 216_092


def test_world_size_1():
    found = total("resnet_ddp_world1.json.gz")
    assert (found.total.comm_ns, found.total.overlap_fraction) == (None, None)
    assert "single_process" in codes(found)
    lengths = {s.step.number: (s.step.end_ns - s.step.begin_ns) / MS for s in found.steps}
    assert lengths[103] == 95.697341
    assert [s.step.number for s in found.steps if s.step.incomplete] == [101]
    # The CPU runs ahead of the GPU by most of a step, and all steps have the same work.
    work = [s.parts.compute_ns / MS for s in found.steps]
    assert max(work) / min(work) < 1.005


def test_gloo():
    found = total("gloo_rank34_of_300.json.gz")
    assert (found.rank, found.trace.world_size, found.on_gpu) == (34, 300, False)
    assert found.total.comm_sum_ns // US in (2135455, 2135456)
    assert round(found.total.comm_sum_ns / US) == 2135456
    assert round(found.total.comm_ns / US) == 1102981
    assert (len(found.collectives), found.total.overlap_fraction) == (10, None)


def test_waiting_rows():
    found = total("cuda_sync_events.json.gz")
    assert codes(found)["sync_rows_ignored"] == 4
    assert found.total.compute_ns == 49 * US


@pytest.mark.parametrize("name", ["no_rank.json.gz", "no_distributed_info.json.gz"])
def test_no_rank_is_one_line_with_the_remedy(name):
    with pytest.raises(InputError, match="does not say which rank") as caught:
        read_ranks([FOLDER / name])
    assert name in caught.value.message
    assert "--rank" in caught.value.remedy
    with pytest.raises(InputError, match="neither GPU work nor collectives"):
        read_ranks([FOLDER / name], rank=0)


def test_relative_times_with_a_base():
    found = read_trace(FOLDER / "base_time_nanoseconds.json.gz")
    assert found.base_time_ns == 1727743122000000000
    assert (found.gpu.begin_ns[:].tolist(), found.gpu.end_ns[:].tolist()) == (
        [2413669097444592],
        [2413669097446352],
    )
    (mark,) = found.marks
    assert (mark.begin_ns, mark.end_ns - mark.begin_ns) == (2413669096090100, 13336315805)


def test_a_large_integer():
    found = split(read_trace(FOLDER / "large_integer.json.gz"), 0)
    assert (found.total.comm_ns, found.total.overlap_fraction) == (50 * US, 0.0)


def test_a_kernel_of_20_ns():
    found = read_trace(FOLDER / "sub_microsecond_kernel.json")
    assert found.gpu.duration_ns[:].tolist() == [20]
    assert found.gpu.begin_ns[:].tolist() == [88437691101749]


REAL = [
    "resnet50_ddp_rank0_of_2.json.gz",
    "dlrm_8_ranks/worker3_step_12.1694128201557.pt.trace.json.gz",
]


@pytest.mark.parametrize("name", REAL)
def test_pieces_of_any_size_read_the_same(name, monkeypatch):
    from ddp_profiler.trace import document

    whole = read_trace(FOLDER / name)
    for size in (1 << 10, 50_021):
        monkeypatch.setattr(document, "PIECE_BYTES", size)
        found = read_trace(FOLDER / name)
        assert found.gpu.begin_ns[:].tolist() == whole.gpu.begin_ns[:].tolist()
        assert found.num_events == whole.num_events
        assert found.launches.begin_ns[:].tolist() == whole.launches.begin_ns[:].tolist()


def test_nothing_real_looks_stretched(dlrm):
    names = ["resnet50_ddp_rank0_of_2.json.gz", "resnet_ddp_world1.json.gz"]
    names.append("small_allreduces_rank1_of_2.json.gz")
    for found in (*dlrm.ranks, *(total(name) for name in names)):
        assert "stretched_kernel" not in codes(found)
