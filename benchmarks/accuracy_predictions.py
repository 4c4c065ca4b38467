"""Predictions that the accuracy page makes before it measures.

Each family is one run to predict from, and settings that are predicted from it first and
measured then.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accuracy_cases import (
    ROOT,
    Case,
    Experiment,
    Figures,
    Row,
    Run,
    lab_study,
    lab_tool,
)

_TIMED = "timed:layers=8,forward_ms=5,backward_ms=10,parameters=500000"
"""40 + 80 ms of sleep, and 16 MB of gradients that become ready one layer after the other."""
_LATE = "part=backward,ms=40,rank=1"
_GPT = "gpt-tiny"


@dataclass(frozen=True)
class Setting:
    """What a run is launched with.

    Attributes:
        nodes: Lab nodes with a rank each.
        mbit: Rate of their links.
        cap_mb: DDP's bucket cap.
        accumulation: Micro-steps in a step.
        late: Whether rank 1 is late by 40 ms in backward.
    """

    nodes: int = 2
    mbit: int = 500
    cap_mb: float = 4.0
    accumulation: int = 1
    late: bool = False

    def words(self, base: Setting) -> str:
        """Returns what is other than in ``base``."""
        found = []
        if self.nodes != base.nodes:
            found.append(f"dp {base.nodes} -> {self.nodes}")
        if self.mbit != base.mbit:
            found.append(f"{base.mbit} -> {self.mbit} Mbit/s")
        if self.cap_mb != base.cap_mb:
            found.append(f"cap {base.cap_mb:g} -> {self.cap_mb:g} MB")
        if self.accumulation != base.accumulation:
            found.append(f"accumulation {base.accumulation} -> {self.accumulation}")
        return ", ".join(found)


FAMILIES: Mapping[str, tuple[Setting, tuple[Setting, ...]]] = {
    "scale": (Setting(), (Setting(nodes=4), Setting(nodes=8))),
    "scale, slow link": (
        Setting(mbit=250),
        (Setting(nodes=4, mbit=250), Setting(nodes=8, mbit=250)),
    ),
    "scale, one bucket": (
        Setting(cap_mb=25),
        (Setting(nodes=4, cap_mb=25), Setting(nodes=8, cap_mb=25)),
    ),
    "link": (
        Setting(mbit=1000),
        (
            Setting(mbit=500),
            Setting(mbit=250),
            Setting(mbit=1000, cap_mb=1),
            Setting(mbit=1000, cap_mb=25),
            Setting(mbit=1000, accumulation=4),
            Setting(nodes=4, mbit=1000),
            Setting(nodes=4, mbit=500, cap_mb=1),
        ),
    ),
    "buckets": (
        Setting(cap_mb=25),
        (
            Setting(cap_mb=1),
            Setting(cap_mb=4),
            Setting(cap_mb=25, accumulation=4),
            Setting(cap_mb=25, mbit=250),
        ),
    ),
    "accumulation": (Setting(accumulation=4), (Setting(), Setting(accumulation=2))),
    "late rank": (
        Setting(late=True),
        (
            Setting(nodes=4, late=True),
            Setting(mbit=250, late=True),
            Setting(cap_mb=25, late=True),
            Setting(accumulation=4, late=True),
        ),
    ),
}
"""What is predicted from what, with timed layers."""

REAL: Mapping[str, tuple[Setting, tuple[Setting, ...]]] = {
    "real compute": (
        Setting(mbit=500, cap_mb=1),
        (
            Setting(mbit=250, cap_mb=1),
            Setting(mbit=1000, cap_mb=1),
            Setting(mbit=500, cap_mb=25),
            Setting(mbit=500, cap_mb=0.25),
            Setting(mbit=500, cap_mb=1, accumulation=4),
            Setting(mbit=250, cap_mb=25),
        ),
    ),
    "real compute, one bucket": (
        Setting(mbit=500, cap_mb=25),
        (
            Setting(mbit=500, cap_mb=1),
            Setting(mbit=250, cap_mb=25),
            Setting(mbit=500, cap_mb=25, accumulation=4),
        ),
    ),
}
"""What is predicted from what, with a model that computes on both cores."""


@contextmanager
def _run(model: str, setting: Setting, levels: str, steps: int, *more: str) -> Iterator[Run]:
    options = ["--model", model, "--dp", levels, "--steps", str(steps)]
    options += ["--bucket-cap-mb", f"{setting.cap_mb:g}"]
    options += ["--accumulate", str(setting.accumulation), "--placement", "packed", *more]
    if setting.late:
        options += ["--plant", _LATE]
    with (
        lab_tool.Lab(nodes=setting.nodes, rate_mbit=setting.mbit) as lab,
        lab_study(lab, *options) as run,
    ):
        yield run


def predicted(folder: Path, base: Setting, target: Setting) -> dict[str, Any]:
    """Predicts with the product's ordinary command."""
    command = [sys.executable, "-m", "ddp_profiler.cli", "predict", str(folder), "--json"]
    command += ["--dp", str(target.nodes), "--accumulate", str(target.accumulation)]
    if target.cap_mb != base.cap_mb:
        command += ["--bucket-cap-mb", f"{target.cap_mb:g}"]
    if target.mbit != base.mbit:
        # Scaled from the rate that was measured, as a user would who knows the ratio.
        summary = json.loads((folder / "summary.json").read_text())
        link = summary["levels"][-1]["allreduce"]["link"]["gbit_per_s"]
        command += ["--bandwidth-gbps", f"{link * target.mbit / base.mbit:.6f}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["predictions"][0]
    return found


class Predictions(Experiment):
    """Steps predicted before they were measured."""

    name = "predict"
    title = "Predictions, made before measuring"
    text = (
        "Lab nodes of one rank each and a model of 8 timed layers (40 ms forward, 80 ms backward, "
        "16 MB of gradients), so that the cores stay free. Each family is one study at dp 1 and "
        "2, from which `ddp-profiler predict` predicts other settings; then they are measured, "
        "mean plain step of a launch of its own. Beside it what is told without a replay: no "
        "overlap of communication and backward, and perfect overlap."
    )
    families = FAMILIES
    quick = "accumulation"
    model = _TIMED
    steps = 20
    goal_median_pct = 3.0
    goal_largest_pct: float | None = 8.0
    goal_covered: float | None = 0.85

    def cases(self, *, quick: bool) -> list[Case]:
        """A case for each family."""
        every = [{"family": name} for name in self.families]
        return [{"family": self.quick}] if quick else every

    def measure(self, case: Case) -> Figures:
        """Runs a study, predicts all of its family, and measures them."""
        base, targets = self.families[case["family"]]
        with _run(self.model, base, "1,2", self.steps, "--allreduce-max-mb", "16") as run:
            forecasts = [predicted(run.folder, base, target) for target in targets]
        found = []
        for target, forecast in zip(targets, forecasts, strict=True):
            with _run(self.model, target, str(target.nodes), self.steps) as run:
                step = run.level(dp=target.nodes)["step_ms"]
            found.append({"target": asdict(target), "predicted": forecast, "measured": step})
        return {"base": asdict(base), "found": found}

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """A row for each prediction, and their summary."""
        rows, errors, inside = [], [], []
        for case, figures in measured:
            base = Setting(**figures["base"])
            for one in figures["found"]:
                target, forecast = Setting(**one["target"]), one["predicted"]
                real = one["measured"]["mean"]
                step, naive = forecast["step_ms"], forecast["naive_ms"]
                low, high = step["interval90"]
                error = (step["median"] / real - 1) * 100
                errors.append(abs(error))
                inside.append(low <= real <= high)
                others = ", ".join(
                    f"{(naive[key] / real - 1) * 100:+.0f} %"
                    for key in ("no_overlap_ms", "perfect_overlap_ms")
                )
                rows.append(
                    Row(
                        f"{case['family']}: {target.words(base)}",
                        f"{real:.1f} ms",
                        f"{step['median']:.1f} ms ({low:.1f} to {high:.1f}); naive: {others}",
                        f"{error:+.1f} %",
                        "stated",
                        None,
                    )
                )
        if not errors:
            return rows
        median, largest = statistics.median(errors), max(errors)
        covered = statistics.mean(inside)
        count = f"{len(errors)} predictions"
        rows.append(
            Row(
                count,
                "median error",
                f"{median:.1f} %",
                "",
                f"{self.goal_median_pct:g} %",
                median <= self.goal_median_pct,
            )
        )
        if self.goal_largest_pct is not None:
            held = largest <= self.goal_largest_pct
            goal = f"{self.goal_largest_pct:g} %"
            rows.append(Row(count, "largest error", f"{largest:.1f} %", "", goal, held))
        if self.goal_covered is not None:
            held = covered >= self.goal_covered
            goal = f"{self.goal_covered:.0%}"
            rows.append(Row(count, "inside the 90 % interval", f"{covered:.0%}", "", goal, held))
        return rows


class RealPredictions(Predictions):
    """The same where ranks compute."""

    name = "predict-real"
    title = "Predictions with real compute"
    text = (
        "As above, with a small GPT on 2 lab nodes of one rank and one thread each, whose compute "
        "and communication share the machine's 2 cores. Launches of the same code differ by "
        "several per cent here, which no prediction can know."
    )
    families = REAL
    quick = "real compute, one bucket"
    model = _GPT
    goal_median_pct = 8.0
    goal_largest_pct = None
    goal_covered = None


class Confirmed(Experiment):
    """A bad setting, what is proposed against it, and what that brings."""

    name = "confirm"
    title = "Predicted and real gain"
    text = (
        "2 lab nodes of one rank each with a bad setting planted; `--confirm` proposes the change "
        "that gains most and measures it in turns with the setting as it was. Buckets: cap 0.1 MB "
        "on links of 250 Mbit/s, 96 timed layers of 0.1 MB. Reductions: 4 micro-steps that all "
        "reduce (no_sync forgotten), 1000 Mbit/s."
    )

    def cases(self, *, quick: bool) -> list[Case]:
        """2 runs of each bad setting."""
        every = [{"bad": bad, "run": run} for bad in _BAD for run in range(2)]
        return every[-1:] if quick else every

    def measure(self, case: Case) -> Figures:
        """Runs a study that confirms."""
        mbit, _, options = _BAD[case["bad"]]
        with (
            lab_tool.Lab(nodes=2, rate_mbit=mbit) as lab,
            lab_study(lab, "--dp", "1,2", "--placement", "packed", "--confirm", *options) as run,
        ):
            return {"confirmation": run.summary["confirmation"]}

    def rows(self, measured: Sequence[tuple[Case, Figures]]) -> list[Row]:
        """A row for each run."""
        rows = []
        for case, figures in measured:
            found = figures["confirmation"]
            _, setting, _ = _BAD[case["bad"]]
            place = f"{case['bad']}, run {case['run'] + 1}"
            if found is None or found["gain_ms"] is None:
                rows.append(Row(place, setting, "nothing confirmed", "", "10 %", False))
                continue
            off = found["error_pct"]
            rows.append(
                Row(
                    f"{place}: {found['text']}",
                    f"real gain {found['gain_ms']:.1f} of {found['before_ms']:.1f} ms",
                    f"predicted {found['predicted_gain_ms']:.1f} ms",
                    f"{off:+.1f} %",
                    "10 %",
                    found["setting"] == setting and abs(off) <= 10,
                )
            )
        return rows


_SMALL_BUCKETS = "timed:layers=96,forward_ms=0.4,backward_ms=0.8,parameters=26000"
_BAD: Mapping[str, tuple[int, str, tuple[str, ...]]] = {
    "buckets": (
        250,
        "bucket_cap_mb",
        ("--model", _SMALL_BUCKETS, "--bucket-cap-mb", "0.1", "--allreduce-max-mb", "16"),
    ),
    "reductions": (
        1000,
        "reduce_once",
        (
            *("--model", _TIMED, "--bucket-cap-mb", "4", "--accumulate", "4"),
            *("--plant", "sync=always", "--allreduce-max-mb", "16"),
        ),
    ),
}
"""Rate of the links, what has to be proposed, and options of the study."""

PREDICTIONS: tuple[Experiment, ...] = (Predictions(), RealPredictions(), Confirmed())
