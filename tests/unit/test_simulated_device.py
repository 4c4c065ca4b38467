"""The event path on a simulated GPU: every length is known, so every part can be checked.

What no simulation shows: that CUDA, NCCL and torch behave as is assumed here; docs/gpu.md.
"""

import numpy as np
import pytest
import torch.distributed as dist

from ddp_profiler.analysis.parts import PARTS, derive_steps, split_exposed
from ddp_profiler.measure.clock import DeviceTimeline
from ddp_profiler.schema import SpanKind, Variant
from tests.unit.simulated_device import MS, US, Gpu, Plan, Rank

STEPS = 4
TOLERANCE_MS = 0.02
"""Two readings of a clock of 0.5 us, and events that an idle stream reaches with the host."""


@pytest.fixture(autouse=True, scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def measure(monkeypatch):
    """Trains some steps on a simulated device; returns rank, steps and parts in ms."""

    def run(plan=None, gpu=None, accumulation=1, variant=Variant.INSTRUMENTED):
        rank = Rank(gpu or Gpu(), plan or Plan(), monkeypatch, accumulation)
        rank.steps(variant, STEPS)
        steps = derive_steps(0, rank.columns(), 0, variant)
        late = rank.plan.peer_late
        parts = dict(steps.parts_ms)
        parts |= split_exposed(steps, steps.backwards.local_end + late, 2)
        assert set(parts) == set(PARTS)
        return rank, steps, {name: parts[name] for name in PARTS}

    return run


def about(ms):
    return pytest.approx([ms] * STEPS, abs=TOLERANCE_MS)


def test_every_part_is_the_kernels_that_were_launched_in_it(measure):
    _, steps, parts = measure()
    assert parts["data"] == about(1)
    assert parts["forward"] == about(12)
    assert parts["backward"] == about(21)
    # The last bucket is handed over with the end of local backward.
    assert parts["exposed_transfer"] == about(4)
    assert parts["exposed_copy"] == about(0.5)
    assert parts["optimizer"] == about(2)
    assert parts["other"] == about(0)
    assert steps.wall_ms == about(40.5)


def test_parts_sum_to_the_step_that_the_device_took(measure):
    rank, steps, parts = measure()
    assert sum(parts.values()) == pytest.approx(steps.wall_ms, abs=1e-9)
    # From the device itself: from one optimizer's end to the next.
    ends = [end for name, _, end in rank.gpu.kernels if name == "optimizer"]
    assert steps.wall_ms[1:] == pytest.approx(np.diff(ends) / MS, abs=0.002)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_timed_kernel_is_found_where_it_is(measure, phase, layer):
    """A longer kernel lengthens its phase by as much, and no other part but what hides it."""
    plan = Plan()
    lengths = list(getattr(plan, phase))
    lengths[layer] += 3_700 * US
    setattr(plan, phase, tuple(lengths))
    _, _, parts = measure(plan)
    expected = {"forward": 12.0, "backward": 21.0}
    expected[phase] += 3.7
    for name, ms in expected.items():
        assert parts[name] == about(ms)
    assert parts["other"] == about(0)


def test_communication_that_fits_beside_backward_is_hidden(measure):
    """Buckets of 4 ms behind kernels of 8, 7 and 6 ms: only the last one shows."""
    _, steps, parts = measure()
    assert steps.busy_ms == about(12)
    assert steps.overlapped_ms == about(8)
    assert parts["exposed_transfer"] == about(4)
    assert steps.collectives.tolist() == [3] * STEPS
    assert steps.gradient_bytes.tolist() == [3 * 2**20] * STEPS


def test_communication_that_does_not_fit_queues_and_is_exposed(measure):
    """Buckets of 20 ms, one after the other on the stream: 60 less the 13 that backward hides."""
    _, steps, parts = measure(Plan(reduce=20 * MS))
    assert parts["backward"] == about(21)
    assert parts["exposed_transfer"] == about(47)
    assert steps.busy_ms == about(60)
    assert steps.overlapped_ms == about(13)


def test_waiting_for_a_late_peer_is_told_from_the_transfer(measure):
    """The other rank is 9 ms behind at each bucket; only at the last one does that show."""
    plan = Plan(backward=(20 * MS, 20 * MS, 20 * MS), peer_late=9 * MS)
    _, steps, parts = measure(plan)
    assert parts["exposed_wait"] == about(9)
    assert parts["exposed_transfer"] == about(4)
    assert steps.overlapped_ms == about(26)


def test_micro_steps_without_reduction_have_no_communication(measure):
    rank, steps, parts = measure(accumulation=3)
    assert rank.group.number == 3 * STEPS
    assert steps.wall_ms == about(3 * 34 + 6.5)
    assert parts["forward"] == about(36)
    assert parts["backward"] == about(63)
    assert parts["exposed_transfer"] == about(4)


def test_the_host_never_waits_within_a_block(measure, monkeypatch):
    """It runs ahead of the device, over optimizer and step alike, until the block is flushed."""
    seen = []
    original = DeviceTimeline.time_ns

    def first_reading(self, mark):
        if not seen:
            seen.append((rank_gpu.waits, rank_gpu.host_ns, rank_gpu.compute.free_ns))
        return original(self, mark)

    rank_gpu = Gpu()
    monkeypatch.setattr(DeviceTimeline, "time_ns", first_reading)
    measure(gpu=rank_gpu)
    waits, host_ns, device_ns = seen[0]
    assert waits == 0
    # Four steps of 40.5 ms, launched in well under one.
    assert device_ns - host_ns > (STEPS - 1) * 40 * MS


def test_reading_before_the_device_is_there_would_be_an_error(measure, monkeypatch):
    """As CUDA's, the simulated events refuse it: times are read behind a wait."""
    monkeypatch.setattr("tests.unit.simulated_device.Event.synchronize", lambda self: None)
    with pytest.raises(RuntimeError, match="device not ready"):
        measure()


def test_plain_steps_record_one_event_each(measure):
    """What the figures of overhead rest on; these steps have no simulated reduction."""
    gpu = Gpu()
    _, steps, _ = measure(gpu=gpu, variant=Variant.PLAIN)
    assert steps.wall_ms == about(1 + 12 + 21 + 2)
    anchors = 1
    assert gpu.events == anchors + STEPS + 1


def test_a_step_that_the_host_limits_is_told_as_such(measure):
    """Launches of 6 ms and kernels of 1: the device is idle, and time lies where it passes."""
    gpu = Gpu(launch_ns=6 * MS)
    plan = Plan(
        copy_in=MS, forward=(MS,) * 3, backward=(MS,) * 3, reduce=MS, copy_out=MS, optimizer=MS
    )
    _, steps, parts = measure(plan, gpu)
    assert sum(parts.values()) == pytest.approx(steps.wall_ms, abs=1e-9)
    launches = 1 + 3 + 3 + 3 + 1 + 1
    assert steps.wall_ms == pytest.approx([launches * 6] * STEPS, abs=0.1)
    assert parts["forward"] == pytest.approx([18] * STEPS, abs=0.1)


@pytest.mark.parametrize("ppm", [200, -350])
def test_a_device_clock_that_drifts_gives_the_host_s_lengths(measure, monkeypatch, ppm):
    """Once its rate is fitted."""
    gpu = Gpu(rate=1 + ppm * 1e-6)
    rank = Rank(gpu, Plan(), monkeypatch)
    for _ in range(3):
        gpu.host_ns += 2_000 * MS
        rank.timeline.move_anchor()
    assert rank.timeline.rate == pytest.approx(1 / gpu.rate, abs=2e-6)
    rank.steps(Variant.INSTRUMENTED, STEPS)
    steps = derive_steps(0, rank.columns(), 0, Variant.INSTRUMENTED)
    # Without the rate it would be off by 8 to 14 us. The first step has the idle device's begin.
    assert steps.wall_ms[1:] == pytest.approx([40.5] * (STEPS - 1), abs=0.002)
    # And the host's times: a step begins when its kernels do.
    first = next(begin for name, begin, _ in gpu.kernels[-13 * STEPS :] if name == "copy in")
    assert abs(int(steps.begin[0]) - first) < 50 * US + rank.timeline.uncertainty_ns


def test_events_are_used_again_and_none_is_in_use_twice(measure, monkeypatch):
    gpu = Gpu()
    rank = Rank(gpu, Plan(), monkeypatch)
    made = []
    for _ in range(3):
        rank.steps(Variant.INSTRUMENTED, STEPS)
        rank.timeline.move_anchor()
        made.append(gpu.events)
    assert made[0] == made[1] == made[2]
    steps = derive_steps(0, rank.columns(), 0, Variant.INSTRUMENTED)
    # Had a mark been used again before it was read, a length would be another one.
    assert steps.wall_ms == pytest.approx([40.5] * 3 * STEPS, abs=TOLERANCE_MS)


def test_completions_are_marked_on_the_stream_that_waits_for_them(measure):
    """Not on the compute stream, where they would seem to end with what was launched last."""
    rank, _, _ = measure()
    columns = rank.columns()
    chosen = columns["kind"] == SpanKind.GRADIENT
    ends = [end for name, _, end in rank.gpu.kernels if name.startswith("reduce")]
    assert columns["end_ns"][chosen] == pytest.approx(ends, abs=2 * US)
    assert (columns["end_ns"][chosen] != columns["begin_ns"][chosen]).all()
