"""Models whose roof is known: what limits them, with peaks and steps measured on this machine.

The best of several steps is held against the best of several products and copies, so that
other work on the machine disturbs neither.
"""

import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.roofline import roofline
from ddp_profiler.measure.operations import count_operations
from ddp_profiler.measure.peaks import measure_peaks
from ddp_profiler.schema import LevelFacts
from ddp_profiler.workload import Workload
from tests.integration.conftest import Looks

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
WIDTH, STEPS = 1024, 8


class Elementwise(nn.Module):
    """Multiplies and bounds 64 MB in place, since new memory costs more than moving it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("large", torch.ones(2**24), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            for _ in range(4):
                self.large.mul_(1.0).clamp_(0.0, 2.0)
        return x * self.scale


class Sleeping(nn.Linear):
    """Does next to nothing, slowly."""

    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


def workload_of(module):
    x = torch.randn(512, WIDTH)
    return Workload(
        name="planted",
        module=module,
        dataset=TensorDataset(x, x.flip(1)),
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: mse_loss(output, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )


def best_step_ms(workload, micro_batch):
    optimizer = workload.optimizer(list(workload.module.parameters()))
    batch = workload.dataset[:micro_batch]
    best = float("inf")
    for _ in range(STEPS):
        begin = time.perf_counter()
        workload.loss(workload.module(*workload.inputs(batch)), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("module", "micro_batch", "bound"),
    [
        (lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), 256, "compute"),
        (Elementwise, 4, "memory"),
        (lambda: Sleeping(WIDTH, WIDTH), 4, "none"),
    ],
    ids=["products", "elementwise", "sleeping"],
)
def test_planted_roof(module, micro_batch, bound):
    workload = workload_of(module())
    counted = count_operations(workload, CPU, micro_batch)

    def measure():
        device = measure_peaks(CPU, torch.float32, rank=0)
        facts = LevelFacts("dp1", 1, 4, 1, (4,), {}, operations=counted, device=device)
        step_ms = best_step_ms(workload, micro_batch)
        parts = dict.fromkeys(PARTS, 0.0) | {"forward": step_ms}
        return roofline(parts, step_ms, 1, facts), device

    def claim(look):
        found, device = look
        assert found.bound == bound, (found, device)

    Looks(measure).show(claim)
