"""The roofline verdict, on parts, operations and peaks made by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.roofline import (
    Bound,
    LeastTimes,
    describe_hardware,
    least_times,
    roofline,
)
from ddp_profiler.measure.operations import count_operations
from ddp_profiler.schema import (
    CopyRate,
    DevicePeaks,
    GpuUse,
    LevelFacts,
    MachineUse,
    OperationCount,
    OperationGroup,
    ParameterFacts,
)
from ddp_profiler.workload import Workload

MB = 10**6
DEVICE = DevicePeaks(
    rank=0,
    name="some processor",
    device_type="cpu",
    arithmetic="fp32",
    flops_per_s=100e9,
    copies=(CopyRate(1000, 50e9), CopyRate(MB, 40e9), CopyRate(100 * MB, 10e9)),
    operation_s=2e-6,
)
PRODUCTS = OperationGroup(operations=10, nbytes=200 * MB, flops=5 * 10**9)  # 50 ms, memory 5 ms
ELEMENTWISE = OperationGroup(operations=4, nbytes=800 * MB, flops=0)  # 80 ms
SMALL = OperationGroup(operations=1000, nbytes=4000, flops=0)  # 2 ms to start


def parts(**given):
    return {part: float(given.get(part, 0.0)) for part in PARTS}


def facts_of(micro_step, optimizer=(), **changes):
    facts = LevelFacts(
        "dp1",
        500,
        2000,
        1,
        (2000,),
        {},
        operations=OperationCount(8, tuple(micro_step), tuple(optimizer)),
        device=DEVICE,
    )
    return replace(facts, **changes)


def verdict(breakdown, facts, accumulation=1, **more):
    return roofline(breakdown, sum(breakdown.values()), accumulation, facts, **more)


def test_each_operation_is_held_against_its_own_roof():
    times = least_times([PRODUCTS, ELEMENTWISE, SMALL], DEVICE)
    assert times == LeastTimes(pytest.approx(50), pytest.approx(80), pytest.approx(2))
    # A thin product moves more than it computes.
    thin = OperationGroup(1, 400 * MB, 10**8)
    assert least_times([thin], DEVICE) == LeastTimes(0, pytest.approx(40), 0)


def test_what_fits_in_a_cache_has_the_caches_rate():
    in_cache = OperationGroup(10, 20 * MB, 0)  # 2 MB each: at 40 GB/s, not 10.
    assert least_times([in_cache], DEVICE).memory_ms == pytest.approx(0.5)
    # On a GPU small copies are slow and nothing is held against an operation for that.
    gpu = replace(DEVICE, copies=(CopyRate(1000, 1e9), *DEVICE.copies[1:]), operation_s=0.0)
    assert least_times([OperationGroup(1, 4000, 0)], gpu).memory_ms == pytest.approx(1e-4)


def test_compute():
    found = verdict(
        parts(forward=25, backward=55, data=5, exposed_transfer=5), facts_of([PRODUCTS])
    )
    assert found.bound is Bound.COMPUTE
    assert found.rest_ms == pytest.approx(80)
    assert found.roof_fraction == pytest.approx(50 / 80)
    assert (found.input_fraction, found.communication_fraction) == pytest.approx((5 / 90, 5 / 90))
    assert "products need at least 50 ms" in found.reason


def test_memory():
    found = verdict(parts(forward=40, backward=60), facts_of([PRODUCTS, ELEMENTWISE]))
    assert found.bound is Bound.MEMORY
    assert found.roof_fraction == pytest.approx(1.3)


def test_neither_roof_is_near():
    found = verdict(parts(forward=40, backward=70), facts_of([PRODUCTS, SMALL]))
    assert found.bound is Bound.NONE
    assert "neither roof is near" in found.reason
    assert "the smallest of 1010 operations take 2 ms to start" in found.reason


def test_input():
    found = verdict(parts(data=60, forward=20, backward=35), facts_of([PRODUCTS]))
    assert found.bound is Bound.INPUT
    assert found.reason == "52 % of the step waits for data (60 of 115 ms)"


@pytest.mark.parametrize("part", ["exposed_transfer", "forward_comm", "backward_comm"])
def test_communication(part):
    found = verdict(parts(forward=20, backward=35, **{part: 80}), facts_of([PRODUCTS]))
    assert found.bound is Bound.COMMUNICATION
    assert found.reason == ("59 % of the step is communication that nothing hides (80 of 135 ms)")


def test_waiting_for_ranks_is_named():
    breakdown = parts(forward=20, backward=35, exposed_transfer=30, exposed_wait=50)
    found = verdict(breakdown, facts_of([PRODUCTS]))
    assert found.bound is Bound.COMMUNICATION
    assert "50 ms of it waiting for other ranks" in found.reason
    # The copy of buckets is the device's own work.
    assert verdict(parts(backward=50, exposed_copy=80), facts_of([PRODUCTS])).bound is Bound.NONE


def test_accumulation_and_optimizer():
    facts = facts_of(
        [PRODUCTS],
        [ELEMENTWISE],
        gradient_bytes=400 * MB,
        reduced=(ParameterFacts("a", 100 * MB), ParameterFacts("b", 300 * MB)),
    )
    found = verdict(parts(forward=300, backward=400, optimizer=100), facts, accumulation=3)
    # Gradients are added twice, each time 2 x 400 MB read and 400 MB written.
    assert found.bytes_per_step == (3 * 200 + 800 + 2 * 1200) * MB
    assert found.operations_per_step == 3 * 10 + 4 + 2 * 2
    assert found.flops_per_step == 3 * 5 * 10**9
    assert found.flops_per_byte == pytest.approx(15e9 / 3800e6)
    assert found.least_compute_ms == pytest.approx(150)
    assert found.least_memory_ms == pytest.approx(80 + 240)


def test_rates_are_of_plain_steps_and_flops_of_the_counter():
    facts = facts_of([PRODUCTS], flops_per_sample=10**9)
    found = verdict(parts(forward=100), facts, plain_ms=80.0)
    assert found.flops_per_step == 8 * 10**9
    assert found.achieved_flops_per_s == pytest.approx(8e9 / 0.080)
    assert found.data_sheet_flops_fraction is None
    h200 = replace(DEVICE, name="NVIDIA H200", device_type="cuda")
    found = verdict(parts(forward=100), replace(facts, device=h200), plain_ms=80.0)
    assert found.data_sheet_flops_fraction == pytest.approx(100e9 / 67e12)


def test_where_it_cannot_be_told():
    breakdown = parts(forward=20, backward=35)
    assert roofline(breakdown, 55.0, 1, None) is None
    assert roofline(breakdown, None, 1, facts_of([PRODUCTS])) is None
    assert verdict(breakdown, facts_of([], operations=None, device=None)) is None
    assert roofline({**breakdown, "data": None}, 55.0, 1, facts_of([PRODUCTS])) is None
    for unknown in (
        {"operations": None},
        {"device": None},
        {"device": replace(DEVICE, flops_per_s=None)},
        {"device": replace(DEVICE, copies=())},
    ):
        found = verdict(breakdown, facts_of([PRODUCTS], **unknown))
        assert found.bound is None
        assert found.roof_fraction is None
        # Input and communication need neither.
        assert verdict(parts(data=9, forward=1), facts_of([PRODUCTS], **unknown)).bound is (
            Bound.INPUT
        )


def test_hardware():
    assert describe_hardware([facts_of([], device=None)]) is None
    found = describe_hardware([facts_of([], device=None), facts_of([])])
    assert found.memory_bytes_per_s == 10e9
    assert found.ridge_flops_per_byte == pytest.approx(10)
    assert found.operation_us == pytest.approx(2)
    assert (found.data_sheet, found.data_sheet_reason) == (None, None)


def test_hardware_of_a_gpu_whose_power_is_limited():
    gpu = replace(DEVICE, name="NVIDIA H200", device_type="cuda", multiprocessors=132)

    def with_limit(watts):
        machine = (MachineUse(0, 1.0, gpu=GpuUse(power_limit_w=watts)),)
        return describe_hardware([facts_of([], device=gpu, machine=machine)])

    assert with_limit(700.0).data_sheet.part == "H200 SXM"
    assert with_limit(300.0).data_sheet is None
    assert "limited to 300 W" in with_limit(300.0).data_sheet_reason


class Chain(nn.Module):
    """Elementwise operations in place on a large buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("large", torch.ones(2**20), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            for _ in range(10):
                self.large.mul_(1.0).clamp_(0.0, 2.0)
        return (x * self.scale).mean(1)


def workload_of(module):
    return Workload(
        name="planted",
        module=module,
        dataset=torch.utils.data.TensorDataset(torch.ones(64, 512), torch.ones(64)),
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: output.sub(batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )


@pytest.mark.parametrize(
    ("module", "bound"),
    [
        (nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1), nn.Flatten(0)), Bound.COMPUTE),
        (Chain(), Bound.MEMORY),
    ],
)
def test_planted_models(module, bound):
    """Operations are really counted; peaks are made by hand, and the step takes 1.5 times least."""
    counted = count_operations(workload_of(module), torch.device("cpu"), 64)
    facts = facts_of([], operations=counted)
    times = least_times((*counted.micro_step, *counted.optimizer), DEVICE)
    least = times.compute_ms + times.memory_ms
    found = verdict(parts(forward=least, backward=least / 2), facts)
    assert found.bound is bound
    # The same operations in a step that takes long for another reason.
    assert verdict(parts(forward=3 * least), facts).bound is Bound.NONE
