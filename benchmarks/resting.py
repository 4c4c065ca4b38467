"""What a step costs while nothing is recorded: between the windows of --every, and afterwards.

    python benchmarks/resting.py

One process, one rank, a model so small that its step takes well below 1 ms: blocks of steps
that nobody observes and blocks between two windows alternate. A third variant, after the last
window, shows that nothing is left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.attachment import Attachment
from ddp_profiler.schema import Variant

ROUNDS = 40
STEPS = 100
_FOREVER = 10**9


@contextlib.contextmanager
def resting(step: Loop) -> Iterator[None]:
    """Attaches, observes one step, and then rests between two windows."""
    plan = [(Variant.WARMUP, 1), (None, _FOREVER)]
    with _attached(plan) as attachment:
        step(2)
        assert not attachment.tracker.done
        assert not attachment.tracker.recording
        yield


@contextlib.contextmanager
def over(step: Loop) -> Iterator[None]:
    """Attaches and observes one step, the only one."""
    with _attached([(Variant.WARMUP, 1)]) as attachment:
        step(2)
        assert attachment.tracker.done
        yield


@contextlib.contextmanager
def _attached(plan: list[tuple[Variant | None, int]]) -> Iterator[Attachment]:
    attachment = Attachment(
        lambda _: Recorder(HostTimeline(), lambda _: None), plan, on_failure=_fail
    )
    attachment.install()
    try:
        yield attachment
    finally:
        attachment.uninstall()


def _fail(error: Exception) -> None:
    raise error


class Loop:
    """The training loop: fetch, zero_grad, forward, backward, step."""

    def __init__(self) -> None:
        self._model = DDP(nn.Linear(4, 4))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        rows = TensorDataset(torch.ones(8 * (STEPS + 2), 4))
        self._batches = DataLoader(rows, batch_size=8)

    def __call__(self, steps: int) -> list[int]:
        """Trains and returns the length of each step in ns."""
        walls = []
        batches = iter(self._batches)
        for _ in range(steps):
            begin = time.monotonic_ns()
            (batch,) = next(batches)
            self._optimizer.zero_grad()
            self._model(batch).sum().backward()
            self._optimizer.step()
            walls.append(time.monotonic_ns() - begin)
        return walls


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    loop = Loop()
    loop(STEPS)
    found: dict[str, list[float]] = {"resting": [], "over": [], "again": []}
    plain = []
    for number in range(ROUNDS):
        order = list(found) if number % 2 else list(found)[::-1]
        base = float(np.median(loop(STEPS)))
        plain.append(base)
        for name in order:
            around = {"resting": resting, "over": over}.get(name)
            with around(loop) if around else contextlib.nullcontext():
                found[name].append(float(np.median(loop(STEPS))) - base)
    print(f"{ROUNDS} rounds of {STEPS} steps; plain step {np.median(plain) / 1e3:.1f} us")
    texts = {"resting": "between windows", "over": "after the last", "again": "plain again"}
    random = np.random.default_rng(0)
    for name, values in found.items():
        drawn = random.choice(values, size=(10_000, len(values)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5]) / 1e3
        print(
            f"{texts[name]:<16} {np.median(values) / 1e3:+6.1f} us a step [{low:+.1f}, {high:+.1f}]"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
