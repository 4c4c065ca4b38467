"""What the accuracy page plants, how it runs the product on it, and what must be found.

Each experiment has cases. A case is measured by the product's ordinary commands and leaves
raw figures; rows of the page are made from them, so that a page can be made again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddp_profiler.record import reader
from ddp_profiler.schema import SpanKind, Variant

ROOT = Path(__file__).resolve().parents[1]
Case = dict[str, Any]
Figures = dict[str, Any]

_TIMEOUT_S = 300
_SMALL = "timed:layers=4,parameters=4096"
"""Steps of 60 ms whose gradients take no time to speak of."""
_MILLION = "timed:layers=4,parameters=1000000"
_GRADIENT_BYTES = 4 * 1_000_000 * 4
"""Of the model above: one bucket, so nothing can overlap."""


def _load_lab() -> Any:
    spec = importlib.util.spec_from_file_location("ddp_lab", ROOT / "launch" / "lab.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


lab_tool = _load_lab()


@dataclass(frozen=True)
class Row:
    """A line of the page.

    Attributes:
        planted: What was planted.
        truth: What must be found.
        found: What was found.
        error: The difference, in its natural unit.
        goal: What the difference may be.
        holds: Whether it is within the goal; None where there is no goal.
    """

    planted: str
    truth: str
    found: str
    error: str
    goal: str
    holds: bool | None


@dataclass(frozen=True)
class Run:
    """A finished run: its summary, its description, and the spans of its ranks."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded

    @property
    def info(self) -> dict[str, Any]:
        """The content of run.json."""
        loaded: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return loaded

    def level(self, **wanted: Any) -> dict[str, Any]:
        """Returns the first level with these values."""
        for level in self.summary["levels"]:
            if all(level[name] == value for name, value in wanted.items()):
                found: dict[str, Any] = level
                return found
        raise RuntimeError(f"the run has no level with {wanted}")

    def share_of_steps(self, every: int) -> float:
        """Returns the share of the first level's instrumented steps that ``every`` divides."""
        columns = reader.read_rank(self.folder, 0).columns
        steps = columns["step"][
            (columns["variant"] == int(Variant.INSTRUMENTED))
            & (columns["kind"] == int(SpanKind.STEP))
            & (columns["level"] == 0)
        ]
        return float(np.mean(steps % every == 0))


_COMMON = ("--allreduce-max-mb", "0", "--threads-per-rank", "1", "--warmup", "2")


@contextmanager
def study(ranks: int, *options: str) -> Iterator[Run]:
    """Runs a study on this host and yields the run; it is removed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={ranks}", "-m", "ddp_profiler.run", "--out", str(folder)]
        done = subprocess.run(
            [*command, *_COMMON, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the study ended with {done.returncode}: {done.stderr[-2000:]}")
        yield Run(folder)


@contextmanager
def lab_study(lab: Any, *options: str) -> Iterator[Run]:
    """Runs a study with one rank on each of a lab's nodes and yields the run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        results = lab.run_torchrun(
            ["-m", "ddp_profiler.run", "--out", str(folder), *_COMMON, *options],
            timeout=_TIMEOUT_S,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        if lab_tool.first_failure(results):
            raise RuntimeError(f"the study failed: {results[0].output[-2000:]}")
        yield Run(folder)


def stream_gbit(lab: Any) -> float:
    """Returns what a plain socket stream carries between two nodes, median of 5, in Gbit/s."""
    return float(statistics.median(lab_tool.socket_stream_gbit(lab) for _ in range(5)))


class Experiment(ABC):
    """One table of the page.

    Attributes:
        name: On the command line.
        title: Heading on the page.
        text: What is planted and how it is judged, for the page.
    """

    name: str
    title: str
    text: str

    @abstractmethod
    def cases(self, *, quick: bool) -> list[Case]:
        """Returns what to measure; a few only where it is about whether all runs."""

    @abstractmethod
    def measure(self, case: Case) -> Figures:
        """Runs the product on a case and returns raw figures."""

    @abstractmethod
    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Returns the table."""

    def enough(self, measured: Sequence[tuple[Case, Figures]], case: Case) -> bool:
        """Tells whether a case need not be measured, after those that were."""
        return False


def _percent(found: float | None, truth: float) -> str:
    return "not found" if found is None else f"{(found / truth - 1) * 100:+.1f} %"


def _within(found: float | None, truth: float, share: float, more: float = 0.0) -> bool:
    return found is not None and abs(found - truth) <= share * truth + more


def _ms(value: float | None) -> str:
    """Returns a time as text; the product withholds what its record does not carry."""
    return "withheld" if value is None else f"{value:.1f} ms"


class Links(Experiment):
    """AllReduce on links of a set rate."""

    name = "links"
    title = "A link of a set rate"
    text = (
        "Lab nodes of one rank each. The truth is what a plain TCP stream carries between two of "
        "them in the same lab (median of 5), since framing takes 4.4 % of the rate. busbw is the "
        "product's AllReduce in isolation; the ring bound, 2(n-1)/n x S/B, is printed with the "
        "link whose rate B the product measured."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """Six labs."""
        every = [{"nodes": n, "mbit": r} for n in (2, 4) for r in (250, 500, 1000)]
        return every[2:3] if quick else every

    def measure(self, case: Case) -> Figures:
        """Runs one lab."""
        nodes = case["nodes"]
        with lab_tool.Lab(nodes=nodes, rate_mbit=case["mbit"]) as lab:
            stream = stream_gbit(lab)
            options = ("--model", _MILLION, "--dp", str(nodes), "--steps", "3")
            with lab_study(lab, *options, "--allreduce-max-mb", "64") as run:
                level = run.level(dp=nodes)
        return {"stream_gbit": stream, "allreduce": level["allreduce"]}

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Bandwidth of each large size, and the ring bound."""
        rows = []
        for case, figures in measured:
            stream, nodes = figures["stream_gbit"], case["nodes"]
            place = f"{nodes} nodes, {case['mbit']} Mbit/s"
            large = [s for s in figures["allreduce"]["sizes"] if s["bytes"] >= 16 * 2**20]
            if not large:
                rows.append(Row(place, "AllReduce of 16 MiB", "none measured", "", "3 %", False))
            for size in large:
                busbw = size["busbw_gb_per_s"] * 8
                rows.append(
                    Row(
                        f"{place}, AllReduce of {size['bytes'] / 2**20:.0f} MiB",
                        f"{stream:.4f} Gbit/s",
                        f"busbw {busbw:.4f} Gbit/s",
                        _percent(busbw, stream),
                        "3 %",
                        _within(busbw, stream, 0.03),
                    )
                )
            bucket, link = figures["allreduce"]["buckets"][0], figures["allreduce"]["link"]
            truth = 2 * (nodes - 1) / nodes * bucket["bytes"] * 8 / (stream * 1e9) * 1e3
            rows.append(
                Row(
                    f"{place}, ring bound of 16 MB on {link['name']}",
                    f"{truth:.1f} ms",
                    f"{bucket['ring_bound_ms']:.1f} ms; measured {bucket['time_ms']:.1f} ms",
                    _percent(bucket["ring_bound_ms"], truth),
                    "3 %",
                    _within(bucket["ring_bound_ms"], truth, 0.03),
                )
            )
        return rows


class LateRank(Experiment):
    """A rank that is late in one part."""

    name = "late"
    title = "A late rank"
    text = (
        "3 ranks on one host; each of them late by 10, 30 and 100 ms in each part, with and "
        "without buffers in the model (DDP broadcasts them from rank 0 at the start of forward). "
        "Right means: that rank and no other, that cause, and the meeting point where the others "
        "wait: the broadcast if its source is late before it, else the gradient reduction (at a "
        "broadcast a late receiver holds only the rank that sends to it). Waiting is what each of "
        "the others spends in exposed_wait and forward_comm, less the broadcast's own time, which "
        "is what the late rank spends there. Each row is three runs, one for each rank."
    )
    _PARTS = ("data", "forward", "between", "backward")

    def cases(self, *, quick: bool) -> list[Case]:
        """Each rank, part, lag, without and with buffers."""
        every = [
            {"rank": r, "part": p, "ms": ms, "buffers": b}
            for p in self._PARTS
            for b in (0, 64)
            for ms in (10, 30, 100)
            for r in (0, 1, 2)
        ]
        return [every[3], every[9]] if quick else every

    def measure(self, case: Case) -> Figures:
        """Runs one study."""
        model = f"{_SMALL},buffers={case['buffers']}"
        plant = f"part={case['part']},ms={case['ms']},rank={case['rank']}"
        with study(3, "--model", model, "--dp", "3", "--steps", "10", "--plant", plant) as run:
            level = run.level(dp=3)
        return {
            "stragglers": level["stragglers"],
            "parts": {rank["rank"]: rank["breakdown_ms"] for rank in level["ranks"]},
        }

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """One row for each part, lag and model, over the ranks."""
        groups: dict[tuple[str, int, int], list[tuple[Case, Figures]]] = {}
        for case, figures in measured:
            key = (case["part"], case["ms"], case["buffers"])
            groups.setdefault(key, []).append((case, figures))
        return [self._row(*key, group) for key, group in groups.items()]

    def _row(self, part: str, ms: float, buffers: int, group: list[tuple[Case, Figures]]) -> Row:
        right, lags, waits = 0, [], []
        for case, figures in group:
            in_forward = bool(buffers) and part == "data" and case["rank"] == 0
            at = "forward_comm" if in_forward else "gradient_reduction"
            cause = "other" if part == "between" else part
            found = figures["stragglers"]
            right += [(s["rank"], s["cause"], s["at"]) for s in found] == [
                (case["rank"], cause, at)
            ]
            lags += [s["lag_ms"] for s in found if s["rank"] == case["rank"]]
            parts = {int(rank): values for rank, values in figures["parts"].items()}
            own = parts[case["rank"]]["forward_comm"]
            waits += [
                (parts[r]["exposed_wait"] or 0.0) + parts[r]["forward_comm"] - own
                for r in parts
                if r != case["rank"]
            ]
        worst_lag = max((abs(lag - ms) for lag in lags), default=float("inf"))
        worst_wait = max((abs(wait - ms) for wait in waits), default=float("inf"))
        return Row(
            f"{part}, {ms} ms, {'with' if buffers else 'no'} buffers",
            f"rank, cause, place; {ms} ms",
            f"right in {right} of {len(group)}; lag {min(lags, default=0):.1f} to "
            f"{max(lags, default=0):.1f}, waiting {min(waits, default=0):.1f} to "
            f"{max(waits, default=0):.1f} ms",
            f"lag {worst_lag:.1f}, waiting {worst_wait:.1f} ms",
            f"5 % + 1 ms: {0.05 * ms + 1:.1f}",
            right == len(group) and max(worst_lag, worst_wait) <= 0.05 * ms + 1,
        )


class NobodyLate(Experiment):
    """No rank is late."""

    name = "nobody"
    title = "Nobody late"
    text = (
        "40 studies of 2 ranks on one host, 20 steps of 60 ms, nothing planted: nobody may be "
        "named. And 10 on 2 lab nodes at 500 Mbit/s with 16 MB of gradients, where one rank may "
        "leave every reduction later than the other."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """40 equal studies on a host, 10 on a link."""
        runs = {"one host": 1 if quick else 40, "slow link": 1 if quick else 10}
        return [{"place": place, "run": i} for place, count in runs.items() for i in range(count)]

    def measure(self, case: Case) -> Figures:
        """Runs one study."""
        options = ("--dp", "2", "--steps", "20", "--model")
        with ExitStack() as stack:
            if case["place"] == "one host":
                run = stack.enter_context(study(2, *options, _SMALL))
            else:
                lab = stack.enter_context(lab_tool.Lab(nodes=2, rate_mbit=500))
                run = stack.enter_context(lab_study(lab, *options, _MILLION))
            return {"stragglers": run.level(dp=2)["stragglers"]}

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Counts false alarms in each place."""
        places = dict.fromkeys(case["place"] for case, _ in measured)
        return [
            row
            for place in places
            for row in self._count(place, [f for c, f in measured if c["place"] == place])
        ]

    def _count(self, place: str, measured: Sequence[Figures]) -> list[Row]:
        alarms = [s for figures in measured for s in figures["stragglers"]]
        runs = sum(bool(figures["stragglers"]) for figures in measured)
        worst = max((s["lag_ms"] for s in alarms), default=0.0)
        return [
            Row(
                f"nothing, {place}, {len(measured)} runs",
                "nobody named",
                f"somebody named in {runs}" + (f" (lag up to {worst:.1f} ms)" if runs else ""),
                f"{runs / len(measured) * 100:.1f} % false alarms",
                "5 %",
                runs <= 0.05 * len(measured),
            )
        ]


class SmallestLag(Experiment):
    """How small a lag is still found."""

    name = "smallest"
    title = "The smallest lag that is found"
    text = (
        "As above, with rank 1 late in backward. 20 runs for each lag, from small to large, until "
        "one is found in 95 % of them."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """20 studies for each lag."""
        lags = (5,) if quick else (1, 1.5, 2, 3, 5, 8)
        return [{"ms": ms, "run": run} for ms in lags for run in range(1 if quick else 20)]

    def enough(self, measured: Sequence[tuple[Case, Figures]], case: Case) -> bool:
        """Ends at the first lag that is found in 95 % of its runs, or skips a hopeless one."""
        for ms in {c["ms"] for c, _ in measured}:
            hits = [self._hit(figures) for c, figures in measured if c["ms"] == ms]
            if ms < case["ms"] and len(hits) >= 20 and sum(hits) >= 0.95 * len(hits):
                return True
            if ms == case["ms"] and len(hits) - sum(hits) > 1:
                return True
        return False

    @staticmethod
    def _hit(figures: Figures) -> bool:
        return [(s["rank"], s["cause"]) for s in figures["stragglers"]] == [(1, "backward")]

    def measure(self, case: Case) -> Figures:
        """Runs one study."""
        plant = f"part=backward,ms={case['ms']},rank=1"
        options = ("--model", _SMALL, "--dp", "2", "--steps", "20", "--plant", plant)
        with study(2, *options) as run:
            return {"stragglers": run.level(dp=2)["stragglers"]}

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Counts hits for each lag."""
        rows = []
        for ms in sorted({case["ms"] for case, _ in measured}):
            hits = [self._hit(figures) for case, figures in measured if case["ms"] == ms]
            given_up = " (given up after two misses)" if len(hits) - sum(hits) > 1 else ""
            rows.append(
                Row(
                    f"rank 1, backward, {ms:g} ms",
                    "rank 1, backward",
                    f"found in {sum(hits)} of {len(hits)}{given_up}",
                    f"{(1 - sum(hits) / len(hits)) * 100:.0f} % missed",
                    "stated",
                    None,
                )
            )
        return rows


class LateAndSlow(Experiment):
    """A late rank and a slow link together."""

    name = "both"
    title = "A late rank and a slow link together"
    text = (
        "2 lab nodes at 500 Mbit/s, 16 MB of gradients in one bucket, rank 1 late by 100 ms in "
        "backward: rank 0 waits for it, then both transfer."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """Equal runs."""
        return [{"run": run} for run in range(1 if quick else 5)]

    def measure(self, case: Case) -> Figures:
        """Runs one lab."""
        options = ("--model", _MILLION, "--dp", "2", "--steps", "6")
        with lab_tool.Lab(nodes=2, rate_mbit=500) as lab:
            stream = stream_gbit(lab)
            plant = "part=backward,ms=100,rank=1"
            with lab_study(lab, *options, "--plant", plant) as run:
                ranks = run.level(dp=2)["ranks"]
        return {"stream_gbit": stream, "ranks": [rank["breakdown_ms"] for rank in ranks]}

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Waiting and transfer of each run."""
        rows = []
        for case, figures in measured:
            bound = _GRADIENT_BYTES * 8 / (figures["stream_gbit"] * 1e9) * 1e3
            early = figures["ranks"][0]
            apart = early["exposed_wait"] is not None
            # Where waiting is withheld, transfer holds both and is not what was planted.
            transfer = (
                statistics.mean(rank["exposed_transfer"] for rank in figures["ranks"])
                if apart
                else None
            )
            wanted: tuple[tuple[str, float | None, float], ...] = (
                ("exposed_wait of rank 0", early["exposed_wait"], 100.0),
                ("exposed_transfer", transfer, bound),
            )
            for what, found, truth in wanted:
                rows.append(
                    Row(
                        f"run {case['run'] + 1}: {what}",
                        f"{truth:.1f} ms",
                        _ms(found),
                        _percent(found, truth),
                        "10 %",
                        _within(found, truth, 0.10),
                    )
                )
        return rows


class Passing(Experiment):
    """A rank that is late now and then."""

    name = "passing"
    title = "A rank late in every tenth step"
    text = "2 ranks, 40 steps, rank 1 late by 100 ms in backward in steps 0, 10, 20, ..."

    def cases(self, *, quick: bool) -> list[Case]:
        """Both ranks, some runs."""
        return [{"rank": r, "run": i} for i in range(1 if quick else 3) for r in (0, 1)]

    def measure(self, case: Case) -> Figures:
        """Runs one study."""
        plant = f"part=backward,ms=100,every=10,rank={case['rank']}"
        options = ("--model", _SMALL, "--dp", "2", "--steps", "40", "--plant", plant)
        with study(2, *options) as run:
            return {
                "stragglers": run.level(dp=2)["stragglers"],
                "share": run.share_of_steps(10),
            }

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Kind, share and lag of each run."""
        rows = []
        for case, figures in measured:
            found = figures["stragglers"]
            first = found[0] if found else None
            right = (
                first is not None
                and len(found) == 1
                and (first["rank"], first["fixed"], first["cause"])
                == (case["rank"], False, "backward")
            )
            share = first["share_of_steps_fraction"] if first else 0.0
            lag = first["lag_ms"] if first else 0.0
            kind = "nobody" if first is None else "fixed" if first["fixed"] else "passing"
            rows.append(
                Row(
                    f"rank {case['rank']}, run {case['run'] + 1}",
                    f"passing, {figures['share']:.3f} of steps, 100 ms",
                    f"{kind}, {share:.3f} of steps, {lag:.1f} ms",
                    f"share {share - figures['share']:+.3f}, lag {lag - 100:+.1f} ms",
                    "share exact, 6 ms",
                    right and share == figures["share"] and abs(lag - 100) <= 6,
                )
            )
        return rows


class Clocks(Experiment):
    """Clocks that are wrong."""

    name = "clocks"
    title = "Clocks that are wrong"
    text = (
        "2 lab nodes at 1000 Mbit/s, rank 1 late by 30 ms in backward. Node 1's monotonic clock is "
        "ahead by 5 s (a time namespace), or its injected clock is ahead by 5 s, runs 50 ppm fast, "
        "and its real time is ahead by 300 ms. Loaded: plain streams fill the link in both "
        "directions all the while. Each run compares clocks twice. The truth must lie within "
        "what is stated: the bounds of each comparison (whose width has a goal, too), and the "
        "offset and the drift of the summary. The straggler must be the same as with right clocks."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """6 runs of each kind of clock and load; right clocks to compare with."""
        kinds = (("right", False), ("offset", False), ("offset", True), ("drift", False))
        every = [
            {"clock": clock, "loaded": loaded, "run": run}
            for clock, loaded in (*kinds, ("drift", True))
            for run in range(1 if quick else 6 if clock != "right" else 3)
        ]
        return every[1:4] if quick else every

    def measure(self, case: Case) -> Figures:
        """Runs one lab."""
        options = ["--model", _SMALL, "--dp", "2", "--steps", "10"]
        options += ["--plant", "part=backward,ms=30,rank=1"]
        if case["clock"] == "drift":
            options += ["--plant", "clock=5000,rank=1,ppm=50,real_ms=300"]
        shift = {1: 5.0} if case["clock"] == "offset" else {}
        with (
            lab_tool.Lab(nodes=2, rate_mbit=1000, clock_shift=shift) as lab,
            _load(lab, case["loaded"]),
            lab_study(lab, *options) as run,
        ):
            level = run.level(dp=2)
            return {
                "clocks": run.info["clocks"],
                "summary": run.summary["run"]["clocks"],
                "straggler": level["straggler"],
                "uncertainty_ms": level["clock_uncertainty_ms"],
            }

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Coverage and straggler for each kind of clock and load."""
        groups: dict[tuple[str, bool], list[Figures]] = {}
        for case, figures in measured:
            groups.setdefault((case["clock"], case["loaded"]), []).append(figures)
        rows = []
        for (clock, loaded), group in groups.items():
            place = f"{_CLOCKS[clock]}, {'loaded' if loaded else 'idle'} link"
            if clock != "right":
                rows += [
                    self._coverage(place, clock, loaded, group),
                    self._stated(place, clock, group),
                ]
            lags = [f["straggler"]["lag_ms"] if f["straggler"] else 0.0 for f in group]
            right = sum(
                f["straggler"] is not None
                and (f["straggler"]["rank"], f["straggler"]["cause"]) == (1, "backward")
                for f in group
            )
            rows.append(
                Row(
                    f"{place}: straggler",
                    "rank 1, backward, 30 ms",
                    f"right in {right} of {len(group)}; lag {min(lags):.1f} to {max(lags):.1f} ms",
                    f"{max(abs(lag - 30) for lag in lags):.1f} ms",
                    "2.5 ms",
                    right == len(group) and all(abs(lag - 30) <= 2.5 for lag in lags),
                )
            )
        return rows

    def _stated(self, place: str, clock: str, group: Sequence[Figures]) -> Row:
        """Judges what the summary says: offset, drift and real time, each with its +-."""
        offsets = drifts = real = 0
        worst = 0.0
        for figures in group:
            (stated,) = figures["summary"]
            first = figures["clocks"][0]["at_ns"]
            off = abs(stated["offset_ms"] - _true_offset_ns(clock, first) / 1e6)
            offsets += off <= stated["uncertainty_ms"]
            ppm = 50.0 if clock == "drift" else 0.0
            drifts += abs(stated["drift_ppm"] - ppm) <= stated["drift_uncertainty_ppm"]
            real_ms = 300.0 if clock == "drift" else 0.0
            real += abs(stated["real_time_offset_ms"] - real_ms) <= 5
            worst = max(worst, stated["drift_uncertainty_ppm"])
        count = len(group)
        return Row(
            f"{place}: stated in the summary",
            "offset, drift, real time",
            f"right in {offsets}, {drifts} and {real} of {count}",
            f"drift known to +-{worst:.0f} ppm at worst",
            "all; real time to 5 ms",
            min(offsets, drifts, real) == count,
        )

    def _coverage(self, place: str, clock: str, loaded: bool, group: Sequence[Figures]) -> Row:
        readings = [reading for figures in group for reading in figures["clocks"]]
        covered, errors, widths = 0, [], []
        for reading in readings:
            truth = _true_offset_ns(clock, reading["at_ns"])
            covered += reading["low_ns"] <= truth <= reading["high_ns"]
            errors.append(abs((reading["low_ns"] + reading["high_ns"]) / 2 - truth) / 1e3)
            widths.append((reading["high_ns"] - reading["low_ns"]) / 2e3)
        return Row(
            place,
            "offset known exactly",
            f"inside in {covered} of {len(readings)}; stated +-{statistics.median(widths):.0f} us "
            f"(median)",
            f"{statistics.median(errors):.0f} us (median)",
            f"inside in 95 %, +-{_WIDTHS_US[loaded]} us",
            bool(readings)
            and covered >= 0.95 * len(readings)
            and statistics.median(widths) <= _WIDTHS_US[loaded],
        )


def _true_offset_ns(clock: str, own_ns: int) -> float:
    """Returns by how much a planted clock is ahead when it shows a time."""
    if clock == "offset":
        return 5e9
    # own = base + 5 s + 50e-6 base, so own - base:
    return own_ns - (own_ns - 5_000_000_000) / (1 + 50e-6)


_WIDTHS_US = {False: 500, True: 5000}
"""What half the bounds may be wide, on an idle and on a loaded link."""


_CLOCKS = {
    "right": "right clocks",
    "offset": "5 s ahead",
    "drift": "5 s ahead, 50 ppm fast, real time 300 ms ahead",
}


@contextmanager
def _load(lab: Any, loaded: bool) -> Iterator[None]:
    """Fills the link between nodes 0 and 1 in both directions."""
    done = threading.Event()

    def fill(src: int, dst: int) -> None:
        while not done.is_set():
            lab_tool.socket_stream_gbit(lab, src, dst, megabytes=64)

    threads = [threading.Thread(target=fill, args=pair) for pair in ((0, 1), (1, 0))]
    for thread in threads if loaded else ():
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads if loaded else ():
            thread.join()


class NoSync(Experiment):
    """Accumulation without no_sync."""

    name = "no-sync"
    title = "Accumulation without no_sync"
    text = (
        "2 lab nodes at 500 Mbit/s, 16 MB of gradients, accumulation 4, gradients reduced in every "
        "micro-step. The finding says how many collectives and bytes that are, and what a step "
        "would gain; the truth is the difference to the same study with no_sync."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """Equal pairs of studies."""
        return [{"run": run} for run in range(1 if quick else 3)]

    def measure(self, case: Case) -> Figures:
        """Runs both studies in one lab."""
        options = ("--model", _MILLION, "--dp", "2", "--accumulate", "4", "--steps", "4")
        with lab_tool.Lab(nodes=2, rate_mbit=500) as lab:
            with lab_study(lab, *options) as run:
                right = run.level(dp=2)["step_ms"]["mean"]
                clean = [f["id"] for f in run.summary["findings"]]
            with lab_study(lab, *options, "--plant", "sync=always") as run:
                level = run.level(dp=2)
                findings = run.summary["findings"]
        return {
            "right_ms": right,
            "wrong_ms": level["step_ms"]["mean"],
            "collectives": level["comm"]["num_gradient_collectives_per_step"],
            "buckets": level["comm"]["num_buckets"],
            "bytes": level["comm"]["gradient_bytes"],
            "finding": next((f for f in findings if f["id"] == "needless-reductions"), None),
            "clean": clean,
        }

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Count, bytes and time."""
        rows = []
        for case, figures in measured:
            run, finding = f"run {case['run'] + 1}", figures["finding"] or {}
            count = f"{figures['collectives']:g} for {figures['buckets']} bucket"
            rows.append(
                Row(
                    f"{run}: collectives and bytes a step",
                    f"4 for 1 bucket, {4 * _GRADIENT_BYTES / 1e6:.0f} MB",
                    f"{count}, {figures['bytes'] / 1e6:.0f} MB",
                    "none" if figures["collectives"] == 4 else "wrong",
                    "exact, finding only here",
                    figures["collectives"] == 4
                    and figures["bytes"] == 4 * _GRADIENT_BYTES
                    and bool(finding)
                    and "needless-reductions" not in figures["clean"],
                )
            )
            truth, found = (
                figures["wrong_ms"] - figures["right_ms"],
                finding.get("expected_gain_ms"),
            )
            rows.append(
                Row(
                    f"{run}: time wasted a step",
                    f"{truth:.0f} ms",
                    _ms(found),
                    _percent(found, truth),
                    "10 %",
                    _within(found, truth, 0.10),
                )
            )
        return rows


class Modules(Experiment):
    """Collectives that are no gradients."""

    name = "modules"
    title = "Collectives inside forward and backward"
    text = (
        "Buffers: 4 layers of 500,000 fp32 buffer elements, broadcast before forward on a link of "
        "500 Mbit/s, and the batch norms of the built-in convnet, with rank 0 late by 40 ms before "
        "it broadcasts. Synchronised batch norm: a stand-in that reduces in forward and in "
        "backward (torch's own needs a GPU), with rank 1 late by 15 and 25 ms there. The truth is "
        "the other rank's time in the collective. Gradients must stay one collective a bucket."
    )
    _BUFFER_BYTES = 4 * 500_000 * 4

    def cases(self, *, quick: bool) -> list[Case]:
        """Three kinds, some runs of each."""
        kinds = ("buffers", "batch norm", "synchronised")
        return [{"kind": kind, "run": run} for run in range(1 if quick else 3) for kind in kinds]

    def measure(self, case: Case) -> Figures:
        """Runs one study."""
        options = ["--dp", "2", "--steps", "10"]
        stream = None
        with ExitStack() as stack:
            if case["kind"] == "buffers":
                lab = stack.enter_context(lab_tool.Lab(nodes=2, rate_mbit=500))
                stream = stream_gbit(lab)
                options += ["--model", "timed:layers=4,parameters=4096,buffers=500000"]
                run = stack.enter_context(lab_study(lab, *options))
            else:
                if case["kind"] == "batch norm":
                    options += ["--model", "convnet", "--plant", "part=data,ms=40,rank=0"]
                else:
                    norm = "tests.integration.sync_norm:make:rank=1,forward_ms=15,backward_ms=25"
                    options += ["--model", norm]
                run = stack.enter_context(study(2, *options))
            level = run.level(dp=2)
        return {
            "stream_gbit": stream,
            "ranks": [rank["breakdown_ms"] for rank in level["ranks"]],
            "comm": level["comm"],
        }

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """The collective's time beside what was planted."""
        rows = []
        for case, figures in measured:
            early, late = (
                (figures["ranks"][1], figures["ranks"][0])
                if case["kind"] != "synchronised"
                else figures["ranks"]
            )
            comm = figures["comm"]
            apart = comm["num_gradient_collectives_per_step"] == comm["num_buckets"]
            wanted: list[tuple[str, float, float]]
            if case["kind"] == "buffers":
                bound = self._BUFFER_BYTES * 8 / (figures["stream_gbit"] * 1e9) * 1e3
                wanted = [("forward_comm", early["forward_comm"], bound)]
            elif case["kind"] == "batch norm":
                wanted = [("forward_comm", early["forward_comm"] - late["forward_comm"], 40.0)]
            else:
                wanted = [
                    (name, early[name] - late[name], truth)
                    for name, truth in (("forward_comm", 15.0), ("backward_comm", 25.0))
                ]
            for name, found, truth in wanted:
                rows.append(
                    Row(
                        f"{case['kind']}, run {case['run'] + 1}: {name}",
                        f"{truth:.1f} ms",
                        f"{found:.1f} ms; gradients {'apart' if apart else 'mixed in'}",
                        f"{found - truth:+.1f} ms",
                        f"5 % + 1 ms: {0.05 * truth + 1:.1f}",
                        apart and _within(found, truth, 0.05, 1.0),
                    )
                )
        return rows


class CrossCheck(Experiment):
    """Other observers of the same steps."""

    name = "crosscheck"
    title = "Other observers of the same steps"
    text = (
        "`benchmarks/crosscheck.py`: communication in flight against the union of torch.profiler's "
        "gloo:all_reduce events, and forward and backward against DDP's own logger, at the same "
        "time in the same steps of 2 ranks. DDP's definitions are others: its forward has no "
        "inputs and no loss, its backward begins at the end of its forward; so only their sum has "
        "a goal. Its logger samples, and its times have gaps. Communication in flight ends for us "
        "when a callback gets the interpreter lock: on the timed model, whose backward runs many "
        "small operations from Python, 0.7 ms late on the average."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """Equal runs."""
        return [{"run": run} for run in range(1 if quick else 3)]

    def measure(self, case: Case) -> Figures:
        """Runs the benchmark."""
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "figures.json"
            done = subprocess.run(
                [sys.executable, str(ROOT / "benchmarks" / "crosscheck.py"), "--json", str(file)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"crosscheck.py ended with {done.returncode}: {done.stderr}")
            return {"result": json.loads(file.read_text())["result"]}

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """Ours beside theirs."""
        rows = []
        for case, figures in measured:
            for model in figures["result"]:
                for figure in model["figures"]:
                    goal = _CROSS_GOALS.get(figure["name"])
                    if figure["name"] not in _CROSS_NAMES:
                        continue
                    difference = figure["difference_percent"]
                    rows.append(
                        Row(
                            f"run {case['run'] + 1}, {model['model']}: {figure['name']}",
                            f"{figure['theirs_ms']:.2f} ms",
                            f"{figure['ours_ms']:.2f} ms",
                            f"{difference:+.1f} %",
                            f"{goal} %" if goal else "other definition",
                            abs(difference) <= goal if goal else None,
                        )
                    )
        return rows


_CROSS_GOALS = {"in flight": 5.0, "both": 5.0}
_CROSS_NAMES = ("in flight", "forward", "backward", "both")


CAUSES: tuple[Experiment, ...] = (
    Links(),
    LateRank(),
    NobodyLate(),
    SmallestLag(),
    LateAndSlow(),
    Passing(),
    Clocks(),
    NoSync(),
    Modules(),
    CrossCheck(),
)
