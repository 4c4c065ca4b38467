"""torch.profiler around some steps of a rank: a second record of what ours has."""

from __future__ import annotations

import contextlib
import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule


class KinetoCapture:
    """Runs torch.profiler in a block of steps and keeps its trace.

    It never raises: the other ranks train on, so this one has to as well. What went wrong is in
    ``problem``, and there is no trace then.

    Args:
        warmup: Steps before those in the trace, 2 or more. The profiler warms up in the last one.
        steps: Steps in the trace; ``ProfilerStep#N`` is step N of the block, from 0.
        device: Where the model lives; the trace has a GPU's work too.
        target: File to write, ``.json.gz``.

    Attributes:
        problem: What went wrong; empty while nothing has.
    """

    def __init__(self, warmup: int, steps: int, device: torch.device, target: Path) -> None:
        self.problem = ""
        self._warmup, self._steps = warmup, steps
        self._device = device
        self._target = target
        self._profiler: profile | None = None

    def begin(self) -> None:
        """Starts before the first step of the block."""

        def start() -> None:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(
                activities=activities,
                schedule=schedule(wait=self._warmup - 1, warmup=1, active=self._steps, repeat=1),
                # Sizes of gloo's collectives.
                record_shapes=True,
            )
            self._profiler.start()

        self._try(start)

    def step(self) -> None:
        """Is told that a step of the block has ended."""
        if self._profiler is not None:
            self._try(self._profiler.step)

    def end(self) -> None:
        """Stops after the block and writes the trace; it gets its name once it is whole."""
        if self._profiler is not None:
            self._try(self._profiler.stop)
        if self._profiler is not None:
            self._try(self._export)
        self._profiler = None

    def _export(self) -> None:
        assert self._profiler is not None
        self._target.parent.mkdir(parents=True, exist_ok=True)
        plain = self._target.with_name(f".{self._target.stem}.partial.json")
        packed = self._target.with_name(f".{self._target.name}.partial")
        try:
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            packed.replace(self._target)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            text = str(error).strip().splitlines()
            self.problem = f"{type(error).__name__}: {text[0] if text else 'no message'}"
            profiler, self._profiler = self._profiler, None
            # Or torch's observers would stay at work in all that follows.
            with contextlib.suppress(Exception):
                if profiler is not None:
                    profiler.stop()
