#!/usr/bin/env python3
"""The checks of gpu_check.py, each a process of its own: measures, and writes rows.

    gpu_check_parts.py NAME FOLDER

FOLDER has ``machine.json``; ``rows.json`` is written to it, rows as gpu_check.Row has them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchkit import Floats, estimate

Ints = npt.NDArray[np.int64]
Rows = list[dict[str, Any]]

WITHIN_PERCENT = 2.0
OTHER_PERCENT, OTHER_MS = 1.0, 0.2
"""Of the product's own goal for what no part explains."""
OVERHEAD_PERCENT = {10: 2.0, 100: 1.0}
SHORT_MS = 1.0
"""A part shorter than this is compared in per cent of this: events resolve 0.5 us."""
PRODUCT_SHARE = (0.5, 1.05)
COPY_SHARE = (0.6, 1.05)
MARK = "gpu_check mark "
_GIB = 2**30


# ----------------------------------------------------------------------------------------------
# Marks among the kernels of a trace.


def place_marks(events: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Returns where each mark lies by torch.profiler's kernels, in ns: a second opinion.

    A mark is an event that its stream reaches when what was launched before it is done, so it
    lies at the end of that. Annotations ``gpu_check mark N S`` say when the host made mark N; S
    is ``main`` for the stream that computes, else it waits for collectives. Marks before which
    nothing was launched are left out.

    Args:
        events: ``traceEvents`` of a trace of torch.profiler with CPU and CUDA activities.
    """
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    work = [
        (launched[args["correlation"]], float(event["ts"]) + float(event["dur"]), event)
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and (args := event.get("args", {})).get("correlation") in launched
    ]
    busy: dict[Any, float] = {}
    for _, _, event in work:
        if not _is_collective(event):
            stream = event["args"].get("stream")
            busy[stream] = busy.get(stream, 0.0) + float(event["dur"])
    main = max(busy, key=lambda stream: busy[stream], default=None)

    def reached(chosen: Iterable[tuple[float, float, Any]]) -> tuple[Floats, Floats]:
        ordered = sorted((at, end) for at, end, _ in chosen)
        ends = np.array([end for _, end in ordered], dtype=float)
        return np.array([at for at, _ in ordered], dtype=float), np.maximum.accumulate(ends)

    streams = {
        "main": reached(w for w in work if w[2]["args"].get("stream") == main),
        "side": reached(w for w in work if _is_collective(w[2])),
    }
    if not len(streams["side"][0]):
        # A rank alone: NCCL has nothing to run.
        streams["side"] = streams["main"]
    found = {}
    for event in events:
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(MARK):
            number, _, stream = str(event["name"]).removeprefix(MARK).partition(" ")
            at, ends = streams[stream]
            place = int(np.searchsorted(at, float(event["ts"])))
            if place:
                found[int(number)] = round(float(ends[place - 1]) * 1000)
    return found


def _is_collective(event: Mapping[str, Any]) -> bool:
    return "nccl" in str(event["name"]).lower()


def compare_parts(
    columns: Mapping[str, Ints], ours: Mapping[int, int], theirs: Mapping[int, int], dp: int
) -> dict[str, tuple[float, float]]:
    """Derives the same parts from two opinions of when marks were reached.

    Args:
        columns: Spans whose begins and ends are numbers of marks, shape [span] each.
        ours: Time of each mark in ns by our timeline.
        theirs: By torch.profiler.
        dp: Ranks that reduce together.

    Returns:
        By part, and for ``step``: mean over steps but the first, in ms, ours and theirs.

    Raises:
        RuntimeError: A mark is not in both.
    """
    from ddp_profiler.analysis.parts import derive_steps, split_exposed
    from ddp_profiler.schema import Variant

    null = np.iinfo(np.int64).min
    told = []
    for times in (ours, theirs):
        placed = dict(columns)
        for name in ("begin_ns", "end_ns"):
            marks = columns[name].tolist()
            missing = [mark for mark in marks if mark != null and mark not in times]
            # Before the first step nothing has been launched in the trace.
            kept = [times.get(mark, min(times.values(), default=0)) for mark in marks]
            if len(missing) > 2:
                raise RuntimeError(f"{len(missing)} of {len(marks)} marks have no kernel before")
            placed[name] = np.array(
                [null if mark == null else at for mark, at in zip(marks, kept, strict=True)],
                dtype=np.int64,
            )
        steps = derive_steps(0, placed, 0, Variant.INSTRUMENTED)
        parts: dict[str, Floats] = {**steps.parts_ms, **split_exposed(steps, None, dp)}
        if dp > 1:
            parts["in flight"] = steps.busy_ms
        # Waiting and transfer are one from a single rank's view.
        parts.pop("exposed_wait")
        parts["step"] = steps.wall_ms
        told.append({name: float(values[1:].mean()) for name, values in parts.items()})
    return {name: (told[0][name], told[1][name]) for name in told[0]}


def difference_percent(ours: float, theirs: float) -> float:
    """Returns ours less theirs in per cent of theirs, or of 1 ms where that is more.

    >>> difference_percent(10.1, 10.0), difference_percent(0.02, 0.01)
    (1.0, 1.0)
    """
    return round((ours - theirs) / max(abs(theirs), SHORT_MS) * 100, 9)


# ----------------------------------------------------------------------------------------------
# Rows.


def row(what: str, figure: float | None, unit: str = "", **more: Any) -> dict[str, Any]:
    """Returns a row of the table; see gpu_check.Row."""
    return {"what": what, "figure": figure, "unit": unit, **more}


def rows_of_level(level: Any) -> Rows:
    """Returns what holds of every measured level: parts sum, little is left over, batch is right.

    Args:
        level: A level of a summary.
    """
    parts = {name: value or 0.0 for name, value in level.breakdown_ms.items()}
    step = level.instrumented_step_ms.mean
    return [
        row(f"{level.id}: parts less step", (sum(parts.values()) - step) * 1000, "us")
        | {"low": -1.0, "high": 1.0},
        row(f"{level.id}: other", parts["other"], "ms")
        | {"high": step * OTHER_PERCENT / 100 + OTHER_MS},
        row(f"{level.id}: global batch", level.batch_check.observed)
        | {"low": level.global_batch, "high": level.global_batch},
        row(f"{level.id}: gradients against one process", _proof(level.batch_check))
        | {"high": 0, "note": f"error {level.batch_check.gradient_max_rel_error}"},
        row(f"{level.id}: step", level.step_ms.mean, "ms"),
    ]


def _proof(check: Any) -> float | None:
    return None if check.gradient_unexplained is None else float(check.gradient_unexplained)


def rows_of_share(level: Any, peak: str) -> Rows:
    """Returns the rows of a level's share of the device's peak."""
    if level.mfu is None:
        return [row(f"{level.id}: share of {peak}", None, note="the peak was not measured")]
    share = level.mfu * 100
    return [row(f"{level.id}: share of {peak}", share, "%") | {"low": 0.1, "high": 100.0}]


def rows_of_search(search: Any) -> Rows:
    """Returns the rows of a search for the micro-batch."""
    fits = [trial for trial in search.trials if trial.micro_step_ns]
    peaks = [trial.peak_bytes for trial in sorted(fits, key=lambda t: t.micro_batch)]
    known = [peak for peak in peaks if peak is not None]
    falls = sum(b < a for a, b in itertools.pairwise(known))
    largest = max((trial.micro_batch for trial in fits), default=0)
    rows = [
        row("largest micro-batch", largest, "samples")
        | {"low": 1, "note": f"dp {search.dp}, ended by: {search.ended}"},
        row("sizes with less memory than a smaller one", falls if len(known) > 1 else None)
        | {"high": 0, "note": f"{len(known)} sizes, {search.memory_source}"},
    ]
    if known and search.limit_bytes:
        share = max(known) / search.limit_bytes * 100
        rows.append(row("most memory used, of the limit", share, "%") | {"high": 100.0})
    return rows


def rows_of_peaks(peaks: Any, sheet: Any) -> Rows:
    """Returns the rows of a device's peaks beside its data sheet.

    Args:
        peaks: What was measured.
        sheet: Its data sheet; None where there is none.
    """
    name = peaks.arithmetic
    promised = sheet.flops_per_s.get(name) if sheet is not None else None
    flops = peaks.flops_per_s
    rows = [row(f"{name} product", flops and flops / 1e12, "TFLOP/s")]
    if promised and flops:
        low, high = PRODUCT_SHARE
        rows.append(row(f"{name} product, of the data sheet", flops / promised))
        rows[-1] |= {"low": low, "high": high, "note": sheet.part}
    if peaks.copies:
        rate = peaks.copies[-1].bytes_per_s
        rows.append(row(f"copy of {peaks.copies[-1].nbytes / _GIB:.2g} GiB", rate / 1e9, "GB/s"))
        if sheet is not None:
            low, high = COPY_SHARE
            rows.append(row("copy, of the data sheet", rate / sheet.memory_bytes_per_s))
            rows[-1] |= {"low": low, "high": high, "note": sheet.part}
    rows.append(row("smallest operation", peaks.operation_s * 1e6, "us"))
    return rows


# ----------------------------------------------------------------------------------------------
# What the checks have in common.


class Machine:
    """Where the checks run.

    Args:
        folder: Of this check.
    """

    def __init__(self, folder: Path) -> None:
        told = json.loads((folder / "machine.json").read_text())
        self.folder = folder
        self.cuda: bool = told["device"] == "cuda"
        self.gpus = len(told["gpus"])
        self.memory_bytes = min(told["memory_bytes"], default=0)
        self.ranks = self.gpus if self.cuda else 2
        if not self.cuda:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""

    @property
    def model(self) -> list[str]:
        """Model and micro-batch for a study: gpt-small on a GPU."""
        if not self.cuda:
            return ["--model", "gpt-tiny", "--micro-batch", "4", "--allreduce-max-mb", "0.01"]
        return ["--model", "gpt-small", "--precision", "bf16", "--micro-batch", self.micro_batch]

    @property
    def micro_batch(self) -> str:
        """So many samples that the device, and not the host, is what a step takes."""
        size = self.memory_bytes / _GIB
        return "64" if size > 60 else "32" if size > 30 else "8"


def torchrun(ranks: int, *words: object, quiet: bool = False) -> str:
    """Starts ranks and returns what they print.

    Raises:
        RuntimeError: They failed.
    """
    environ = dict(os.environ)
    if environ.get("CUDA_VISIBLE_DEVICES") == "":
        environ.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", *map(str, words)]
    done = subprocess.run(command, env=environ, capture_output=quiet, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr or "")
        raise RuntimeError(f"torchrun ended with {done.returncode}; its messages are above")
    return done.stdout or ""


def load(run: Path) -> tuple[Any, Any]:
    """Returns the summary and the description of a run."""
    from ddp_profiler.load import load_summary
    from ddp_profiler.record.reader import read_run_info

    return load_summary(run), read_run_info(run)


class Pause:
    """A kernel of a length that is asked for: ``torch.cuda._sleep``, or a sleep of the host.

    Args:
        cuda: Whether on a GPU.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.cycles_per_ms = 0.0
        if cuda:
            # Clocks settle under load.
            for _ in range(10):
                self._run(100_000_000)
            self.calibrate()

    def calibrate(self) -> float:
        """Measures cycles in a ms by events around kernels of about 5 ms; returns it."""
        if not self.cuda:
            return 0.0
        cycles = round((self.cycles_per_ms or 1.5e6) * 5)
        self.cycles_per_ms = cycles / float(np.median([self._run(cycles) for _ in range(9)]))
        return self.cycles_per_ms

    def _run(self, cycles: int) -> float:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        _sleep(cycles)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def __call__(self, ms: float) -> None:
        """Takes so long: on the device's stream, or here."""
        if ms <= 0:
            return
        if self.cuda:
            _sleep(round(ms * self.cycles_per_ms))
        else:
            time.sleep(ms / 1000)


def _sleep(cycles: int) -> None:
    import torch

    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class Timed:
    """A level of one rank whose layers take what they are told to.

    Args:
        pause: Takes the time.
        layers: Layers, a bucket of 1 MiB each.

    Attributes:
        forward_ms: What each layer's forward takes from now on.
        backward_ms: Its backward.
    """

    def __init__(self, pause: Pause, layers: int) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn

        from ddp_profiler.measure.loop import LevelRun
        from ddp_profiler.measure.marks import Columns, Recorder
        from ddp_profiler.measure.study import make_timeline
        from ddp_profiler.schema import LevelSettings, Variant
        from ddp_profiler.workload import Planter, Workload
        from ddp_profiler.workload.data import synthetic_pairs

        self.forward_ms = self.backward_ms = 0.0
        owner = self
        device = torch.device("cuda", 0) if pause.cuda else torch.device("cpu")

        class Kernel(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(weight)
                pause(owner.forward_ms)
                return x + weight[0]

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                (weight,) = ctx.saved_tensors
                pause(owner.backward_ms)
                return gradient, torch.zeros_like(weight)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(2**18))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: Any = Kernel.apply(x, self.weight)  # type: ignore[no-untyped-call]
                assert isinstance(result, torch.Tensor)
                return result

        def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
            result: torch.Tensor = (output - batch[1]).square().mean()
            return result

        workload = Workload(
            name="timed kernels",
            module=nn.Sequential(*(Layer() for _ in range(layers))),
            dataset=synthetic_pairs(0),
            inputs=lambda batch: (batch[0],),
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )
        # Else threads wait for each other where cores are taken, as in a rehearsal.
        torch.set_num_threads(1)
        if not dist.is_initialized():
            backend = "nccl" if pause.cuda else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._kept: list[Columns] = []
        assert dist.group.WORLD is not None
        self.run = LevelRun(
            LevelSettings("dp1", 1, 4, 1, "packed", (0,)),
            workload,
            Recorder(make_timeline(device), self._kept.append),
            dist.group.WORLD,
            0,
            device,
            bucket_cap_mb=1,
            precision="fp32",
            seed=0,
            planter=Planter((), 0),
        )
        self.run.run_block(3, Variant.WARMUP)

    def steps(self, variant: Any, count: int) -> Any:
        """Trains a block and returns its steps but the first."""
        from ddp_profiler.analysis.parts import derive_steps
        from ddp_profiler.measure.clock import DeviceTimeline

        timeline = self.run.recorder.timeline
        if isinstance(timeline, DeviceTimeline):
            timeline.move_anchor()
        self._kept.clear()
        self.run.recorder.begin_block(0, 0, 0, variant)
        self.run.run_block(count + 1, variant)
        steps = derive_steps(0, as_arrays(self._kept), 0, variant)
        return steps.only(np.arange(len(steps)) > 0)


def as_arrays(batches: Iterable[Mapping[str, Sequence[int | None]]]) -> dict[str, Ints]:
    """Joins batches of spans into columns, shape [span] each; null is the least integer."""
    null = np.iinfo(np.int64).min
    joined: dict[str, list[int]] = {}
    for batch in batches:
        for name, values in batch.items():
            joined.setdefault(name, []).extend(null if v is None else v for v in values)
    return {name: np.array(values, dtype=np.int64) for name, values in joined.items()}


# ----------------------------------------------------------------------------------------------
# The checks.


def check_kernels(machine: Machine) -> Rows:
    """Plants kernels of known length in forward and backward, in turns with none."""
    from ddp_profiler.schema import Variant

    pause = Pause(machine.cuda)
    timed = Timed(pause, layers=4)
    planted = {"forward": 1.5, "backward": 2.5}
    rounds, count = (6, 5) if machine.cuda else (2, 2)
    found: dict[str, list[float]] = {name: [] for name in planted}
    rates = [pause.calibrate()]
    # A kernel beforehand in each layer, so that the device is never ahead of the host.
    base = 1.0
    for _ in range(rounds):
        told = {}
        for on in (0, 1):
            timed.forward_ms = base + on * planted["forward"]
            timed.backward_ms = base + on * planted["backward"]
            told[on] = timed.steps(Variant.INSTRUMENTED, count).parts_ms
        for name in planted:
            found[name].append(float(np.median(told[1][name]) - np.median(told[0][name])))
    asked_rate = pause.cycles_per_ms
    rates.append(pause.calibrate())
    rows = []
    for name, ms in planted.items():
        # Lengths are asked for in cycles: the clock's rate before and after says what they took.
        scale = asked_rate / float(np.mean(rates)) if machine.cuda else 1.0
        truth = 4 * ms * scale
        rows.append(
            row(f"{name}: found of {truth:.3f} ms", (np.median(found[name]) / truth - 1) * 100, "%")
            | {"low": -WITHIN_PERCENT, "high": WITHIN_PERCENT}
        )
    if machine.cuda:
        rows.append(row("clock rate, after against before", (rates[1] / rates[0] - 1) * 100, "%"))
    return rows


def check_overhead(machine: Machine) -> Rows:
    """Plain and instrumented blocks in turns, at steps of two lengths."""
    from ddp_profiler.schema import Variant

    pause = Pause(machine.cuda)
    layers = 8
    timed = Timed(pause, layers)
    rows = []
    for ms, rounds in ((10, 24), (100, 8)) if machine.cuda else ((10, 2), (100, 1)):
        timed.forward_ms, timed.backward_ms = 0.4 * ms / layers, 0.6 * ms / layers
        differences, steps = [], []
        for number in range(rounds):
            order = [Variant.PLAIN, Variant.INSTRUMENTED]
            told = {
                variant: float(np.median(timed.steps(variant, 5).wall_ms))
                for variant in (order if number % 2 == 0 else order[::-1])
            }
            steps.append(told[Variant.PLAIN])
            differences.append(told[Variant.INSTRUMENTED] - told[Variant.PLAIN])
        cost, step = estimate(np.array(differences)), float(np.median(steps))
        low, high = (end / step * 100 for end in cost.ci95)
        rows.append(
            row(f"cost at steps of {step:.1f} ms", cost.value / step * 100, "%")
            | {"high": OVERHEAD_PERCENT[ms]}
            | {"note": f"95 % interval {low:.2f} to {high:.2f} %, {layers} buckets, dp 1"}
        )
    return rows


def check_peaks(machine: Machine) -> Rows:
    """Measures products in bf16 and fp32, and copies, beside the data sheet."""
    import torch

    from ddp_profiler.analysis.data_sheets import find_sheet
    from ddp_profiler.measure.peaks import measure_peaks

    device = torch.device("cuda", 0) if machine.cuda else torch.device("cpu")
    rows: Rows = []
    # Not every processor computes bf16 in a time worth waiting for.
    for dtype in (torch.bfloat16, torch.float32) if machine.cuda else (torch.float32,):
        peaks = measure_peaks(device, dtype, 0)
        match = find_sheet(peaks.name, peaks.memory_bytes, peaks.multiprocessors)
        rows += rows_of_peaks(peaks, match.sheet)
    if match.sheet is None:
        rows.append(row("data sheet", None, note=match.reason or "none"))
    # The copies are the same twice.
    seen: dict[str, dict[str, Any]] = {}
    for one in rows:
        seen.setdefault(one["what"], one)
    return list(seen.values())


def check_parts(machine: Machine) -> Rows:
    """The same marks by our events and by torch.profiler's kernels, on every rank."""
    torchrun(machine.ranks, Path(__file__).resolve(), "parts-rank", machine.folder)
    rows: Rows = []
    for rank in range(machine.ranks):
        told = json.loads((machine.folder / f"parts-{rank}.json").read_text())
        if told["problem"]:
            rows.append(row(f"rank {rank}", None, note=told["problem"]))
            continue
        for name, (ours, theirs) in told["parts"].items():
            if max(ours, theirs) < 0.001:
                continue
            note = f"ours {ours:.3f} ms, torch.profiler's kernels {theirs:.3f} ms"
            rows.append(row(f"rank {rank}: {name}", difference_percent(ours, theirs), "%"))
            rows[-1] |= {"low": -WITHIN_PERCENT, "high": WITHIN_PERCENT, "note": note}
    return rows


def parts_rank(machine: Machine) -> None:
    """One rank of :func:`check_parts`, under torchrun."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from ddp_profiler.measure.loop import LevelRun
    from ddp_profiler.measure.marks import Columns, Recorder
    from ddp_profiler.measure.session import Session, choose_device
    from ddp_profiler.measure.study import make_timeline
    from ddp_profiler.measure.topology import read_topology
    from ddp_profiler.schema import LevelSettings, Variant
    from ddp_profiler.workload import Planter, build

    topology = read_topology(os.environ)
    session = Session(topology, choose_device(topology, "auto", None), timeout_s=60)
    device = session.device.device
    dp = topology.world_size
    model, micro_batch = ("gpt-small", int(machine.micro_batch)) if machine.cuda else ("mlp", 4)
    level = LevelSettings("parts", dp, micro_batch, 1, "packed", tuple(range(dp)))
    group = session.make_groups((level,))[level.ranks]
    kept: list[Columns] = []
    run = LevelRun(
        level,
        build(model, seed=0, micro_batch=micro_batch),
        Recorder(make_timeline(device), kept.append),
        group,
        topology.rank,
        device,
        bucket_cap_mb=25,
        precision="bf16" if machine.cuda else "fp32",
        seed=0,
        planter=Planter((), topology.rank),
    )
    run.run_block(4, Variant.WARMUP)
    kept.clear()
    recorder, timeline = run.recorder, run.recorder.timeline
    make, tell = recorder.mark, timeline.time_ns
    numbers: dict[int, int] = {}
    alive: list[Any] = []
    ours: dict[int, int] = {}

    def key(mark: Any) -> int:
        return mark if isinstance(mark, int) else id(mark)

    def numbered() -> Any:
        side = machine.cuda and torch.cuda.current_stream() != torch.cuda.default_stream()
        number = len(alive)
        with record_function(f"{MARK}{number} {'side' if side else 'main'}"):
            mark = make()
        alive.append(mark)
        numbers[key(mark)] = number
        return mark

    def told(mark: Any) -> int:
        number = numbers[key(mark)]
        ours[number] = tell(mark)
        # Spans then hold numbers of marks, and either opinion can be put in.
        return number

    recorder.mark = numbered
    timeline.time_ns = told  # type: ignore[method-assign]
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * machine.cuda
    recorder.begin_block(0, 0, 0, Variant.INSTRUMENTED)
    with profile(activities=activities) as profiler:
        run.run_block(6, Variant.INSTRUMENTED)
    file = machine.folder / f"trace-{topology.rank}.json"
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    problem, parts = "", {}
    theirs = place_marks(events)
    columns = as_arrays(kept)
    if not machine.cuda:
        # Nothing runs on a device: what can be tried is that all marks are there and agree.
        problem = f"needs a GPU's kernels; {len(ours)} marks of 6 steps were made on the host"
        compare_parts(columns, ours, ours, dp)
    else:
        parts = compare_parts(columns, ours, theirs, dp)
    (machine.folder / f"parts-{topology.rank}.json").write_text(
        json.dumps({"problem": problem, "parts": parts})
    )
    run.close()
    session.close()


def check_study(machine: Machine) -> Rows:
    """A study at every dp, with torch.profiler's traces of some of its steps."""
    from ddp_profiler.captured import read_captured

    run = machine.folder / "run"
    dp = ",".join(map(str, range(1, machine.ranks + 1)))
    counts = ["--steps", "10", "--warmup", "5", "--kineto", "3"]
    if not machine.cuda:
        counts = ["--steps", "2", "--warmup", "2", "--kineto", "2"]
    options = ["--dp", dp, *counts, *machine.model, "--timeout", "60", "--out", str(run)]
    torchrun(machine.ranks, "-m", "ddp_profiler.run", *options)
    summary, info = load(run)
    node = info.environment["0"]
    rows: Rows = [row("dp measured", len({level.dp for level in summary.levels}))]
    rows[0] |= {"low": machine.ranks, "high": machine.ranks, "note": f"backend {node['backend']}"}
    if machine.cuda:
        rows.append(row("backend is NCCL", float(node["backend"] == "nccl")) | {"low": 1})
        rows[-1]["note"] = f"NCCL {node['nccl']} of {node['nccl_library'] or 'torch itself'}"
    for level in summary.levels:
        rows += rows_of_level(level)
        rows += rows_of_share(level, "bf16 peak" if machine.cuda else "fp32 peak")
        rows.append(row(f"{level.id}: efficiency", level.efficiency))
    for level in read_captured(run).levels:
        for compared in level.compared:
            what = f"{level.level} rank {compared.rank}: in flight against kernels"
            note = "; ".join(compared.notes)
            rows.append(row(what, compared.difference_pct, "%", note=note))
            rows[-1] |= {"low": -WITHIN_PERCENT, "high": WITHIN_PERCENT}
    if machine.cuda and machine.ranks == 1:
        rows.append(row("NCCL between GPUs", None, note="this machine has one GPU"))
    return rows


_SCRIPT = """
import hashlib, os, sys
import torch, torch.distributed as dist
from torch import nn
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
width = 2048 if cuda else 64
net = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
                    nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).to(device)
model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(40):
    x = torch.randn(256 if cuda else 8, width, generator=generator).to(device)
    y = torch.randint(10, (len(x),), generator=generator).to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256()
for name, value in sorted(net.state_dict().items()):
    digest.update(name.encode() + value.cpu().numpy().tobytes())
print("weights", dist.get_rank(), digest.hexdigest(), float(loss), flush=True)
dist.destroy_process_group()
"""


def check_script(machine: Machine) -> Rows:
    """Trains with a script twice alone and once observed, and compares the weights' bits."""
    script, run = machine.folder / "train.py", machine.folder / "run"
    script.write_text(_SCRIPT)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Else NCCL may choose another algorithm, and so another order of sums, each time.
    os.environ.setdefault("NCCL_ALGO", "Ring")

    def weights(*words: object) -> list[str]:
        said = torchrun(machine.ranks, *words, quiet=True)
        return sorted(line for line in said.splitlines() if line.startswith("weights "))

    alone, again = weights(script), weights(script)
    observed = weights("-m", "ddp_profiler.run", "--steps", "10", "--out", run, script)
    rows = rows_of_weights(alone, again, observed, machine.ranks)
    summary, _ = load(run)
    level = summary.levels[0]
    parts = sum(value or 0.0 for value in level.breakdown_ms.values())
    rows.append(
        row("parts less step", (parts - level.instrumented_step_ms.mean) * 1000, "us")
        | {"low": -1.0, "high": 1.0}
    )
    rows.append(row("gradient collectives of a step", level.comm.num_gradient_collectives_per_step))
    rows[-1] |= {"low": 1}
    return rows


def rows_of_weights(
    alone: Sequence[str], again: Sequence[str], observed: Sequence[str], ranks: int
) -> Rows:
    """Returns whether weights are the same to the bit with and without the profiler.

    Args:
        alone: A line for each rank, without it.
        again: The same once more: only what is reproducible can be compared.
        observed: With it.
        ranks: Lines that there must be.
    """
    what = "ranks whose weights differ by being observed"
    if list(alone) != list(again):
        return [row(what, None, note="the script alone does not give the same bits twice")]
    if len(alone) != ranks:
        raise RuntimeError(f"{len(alone)} of {ranks} ranks told their weights")
    differ = len(set(alone) ^ set(observed)) / 2
    note = f"SHA-256 {hashlib.sha256(' '.join(alone).encode()).hexdigest()[:12]} of both"
    return [row(what, differ, note="" if differ else note, high=0)]


def check_memory(machine: Machine) -> Rows:
    """Doubles the micro-batch until memory is used up or samples get slower."""
    run = machine.folder / "run"
    options = ["--find-micro-batch", "--dp", str(machine.ranks), "--steps", "1", "--warmup", "2"]
    options += ["--allreduce-max-mb", "0", "--timeout", "60", "--out", str(run)]
    model = ["--model", "gpt-small", "--precision", "bf16", "--micro-batch", "4"]
    if not machine.cuda:
        model = ["--model", "gpt-tiny", "--micro-batch", "4", "--memory-limit-gb", "0.18"]
    torchrun(machine.ranks, "-m", "ddp_profiler.run", *options, *model)
    search = load(run)[1].micro_batches
    if search is None:
        raise RuntimeError("the run has no search")
    return rows_of_search(search)


def check_gloo(machine: Machine) -> Rows:
    """Two ranks share a GPU, as where there is only one: gloo carries their gradients."""
    if machine.cuda and machine.gpus > 1:
        return [row("two ranks on one GPU", None, note=f"{machine.gpus} GPUs: NCCL is used")]
    run = machine.folder / "run"
    options = ["--backend", "gloo", "--dp", "1,2", "--steps", "5", "--warmup", "2"]
    options += ["--model", "mlp", "--allreduce-max-mb", "0.1", "--timeout", "45", "--out", str(run)]
    torchrun(2, "-m", "ddp_profiler.run", *options)
    rows: Rows = []
    for level in load(run)[0].levels:
        rows += rows_of_level(level)
    return rows


CHECKS: Mapping[str, Callable[[Machine], Rows]] = {
    "kernels": check_kernels,
    "parts": check_parts,
    "overhead": check_overhead,
    "peaks": check_peaks,
    "study": check_study,
    "script": check_script,
    "memory": check_memory,
    "gloo": check_gloo,
}


def main() -> None:
    """Runs one check, or one rank of it."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    machine = Machine(folder)
    if name == "parts-rank":
        parts_rank(machine)
        return
    rows = CHECKS[name](machine)
    (folder / "rows.json").write_text(json.dumps(rows, default=float))
    sys.stdout.flush()
    # Not by the interpreter's end, at which torch sometimes aborts: the rows are written.
    os._exit(0)


if __name__ == "__main__":
    main()
