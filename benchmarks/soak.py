"""Loses runs at random moments, many times, and says how they ended; and one long run.

    python benchmarks/soak.py --times 100 --json soak.json
    python benchmarks/soak.py --times 20 --faults KILL,STOP --seed 3
    python benchmarks/soak.py --long --json long.json

Each fault is planted at a moment drawn anew in a phase drawn anew, on a rank drawn anew; the seed
makes a series repeatable but for the machine's own timing. Figures are kept in the file of --json
after each fault, and a series that is called again with it goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchkit
import faultkit
import psutil
import torch

FORMAT = 3
"""Of the JSON file. 2: the phase that a fault came in, as the rank itself noted it; 3: ``kept``."""
TIMEOUT_S = 5
SETTLE_S = 150.0
"""From the start of a launch to its end, at most: start-up, --timeout, the report, torchrun."""
KINDS = ("KILL", "TERM", "raise", "memory", "fill", "STOP", "loop")
"""``fill``: memory is taken until the kernel ends the rank; where a memory cgroup can be made."""
FILL_WITHIN_BYTES = 2 << 30
PHASES = {
    "start-up": "start-up",
    "warm-up": "warmup",
    "baseline": "no_sync",
    "measured": "instrumented",
    "AllReduce": "allreduce",
    "gathering": "collecting",
    "writing": "writing",
}
"""What a phase is called in a table, and in the name of a phase of the worker."""
_LASTS_MS = {
    "start-up": 1500,
    "warm-up": 30,
    "baseline": 30,
    "measured": 60,
    "AllReduce": 60,
    "gathering": 2,
    "writing": 900,
}
"""About how long it lasts: a moment is drawn from so much."""
MODEL = "timed:layers=4,parameters=20000,forward_ms=1,backward_ms=2"


def words_of(folder: Path, *options: str) -> list[str | Path]:
    """Returns what each rank runs."""
    words: list[str | Path] = ["-m", "ddp_profiler.run", "--model", MODEL, "--dp", "2"]
    words += ["--steps", "20", "--warmup", "5", "--micro-batch", "4", "--allreduce-max-mb", "0.1"]
    return [*words, "--timeout", str(TIMEOUT_S), "--out", folder, *options]


def one(number: int, seed: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Plants a fault and returns what became of the run."""
    draw = random.Random(f"{seed}/{number}")
    kind = kinds[number % len(kinds)]
    names = list(PHASES)
    # Each kind goes through all phases.
    phase = names[(number // len(kinds) + number % len(kinds)) % len(names)]
    # Rank 0 alone writes the report.
    rank = 0 if phase == "writing" else draw.randrange(2)
    after_ms = round(draw.random() * _LASTS_MS[phase], 1)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder, note = Path(temporary) / "run", Path(temporary) / "note"
        spec = f"fate={kind},rank={rank},phase={PHASES[phase]},after_ms={after_ms},note={note}"
        group = None
        if kind == "fill":
            group = stack.enter_context(faultkit.memory_limited_to(FILL_WITHIN_BYTES))
            if group is None:
                raise SystemExit("soak.py: no memory cgroup can be made here; leave fill out.")
        # Memory is handed out slowly near its limit: not what the other rank's patience is about.
        patience = ["--timeout", "60"] if kind == "fill" else []
        words = words_of(folder, "--plant", spec, *patience)
        ended = faultkit.launch(words, folder, limit_s=SETTLE_S, within=group)
        found: dict[str, Any] = {
            # Of the fault itself: what has to be named.
            "came_in": note.read_text() if note.exists() else None,
            "kind": kind,
            "phase": phase,
            "rank": rank,
            "after_ms": after_ms,
            "code": ended.code,
            "seconds": ended.seconds,
            "left": ended.left,
            "trace": "Traceback" in ended.ours,
            "said": ended.ours[-3000:],
        }
        if (folder / "run.json").exists():
            kept = faultkit.kept(folder)
            found |= {
                "on_disk": kept.on_disk,
                "readable": kept.readable,
                "analyze": kept.code,
                "partial": kept.partial,
                "status": kept.info.get("status"),
                "failures": kept.info.get("failures", []),
                "analysis": kept.text[-2000:] if kept.code else "",
            }
    return found | judge(found)


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what held of a lost run.

    A fault that came after the run had ended is ``missed``; one after all was measured need not
    leave a partial run. The phase has to be the one that the rank noted before its fault. ``kept``:
    the first failure in run.json is that rank in that phase, where one is due there.
    """
    told = found["said"]
    if found["code"] == 0:
        return {"missed": True}
    complete = found.get("status") == "complete"
    kind, rank = found["kind"], found["rank"]
    # As a sentence about it, or as a row of the table of all ranks.
    about = [
        text for text in told.splitlines() if re.search(rf"[Rr]ank {rank}\b|^ +{rank} +\S", text)
    ]
    phase = found["came_in"] or "nowhere"
    if phase.startswith("writing"):
        phase = "writing"
    wanted = {
        "KILL": "SIGKILL",
        "TERM": "SIGTERM",
        "STOP": "stopped",
        "raise": "planted exception",
        "memory": "allocate memory",
        "fill": "out of memory",
        # It is alive: the table has its place in the code.
        "loop": "planted_fate.py",
    }[kind]
    named_cause = wanted in told or (kind == "loop" and complete)
    measured = bool(found.get("on_disk"))
    first = (found.get("failures") or [{"rank": None, "phase": ""}])[0]
    return {
        "missed": False,
        "in_time": found["code"] is not None,
        "named_rank": bool(about),
        "named_cause": named_cause,
        "named_phase": any(phase in text for text in about),
        "kept": not _is_due(found) or (first["rank"] == rank and phase in first["phase"]),
        "all_readable": found.get("on_disk") == found.get("readable"),
        # Nothing recorded: analyze says so.
        "marked": complete or not measured or bool(found.get("partial")),
        "analyzed": not measured or found.get("analyze") == 0,
        "clean": not found["left"] and not found["trace"],
    }


def _is_due(found: dict[str, Any]) -> bool:
    """Tells whether run.json has a place for this fault.

    A rank in a loop never fails: who waits for it does. After all was measured nothing is kept.
    """
    return found.get("status") not in (None, "complete") and found["kind"] != "loop"


_HELD = (
    "in_time",
    "named_rank",
    "named_cause",
    "named_phase",
    "kept",
    "all_readable",
    "marked",
    "analyzed",
    "clean",
)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns a row for each kind and phase, and what did not hold."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for found in results:
        rows[found["kind"], found["phase"]].append(found)
    lines = [
        "| kind | phase | faults | came too late | ended in time | median s | max s | rank named | "
        "cause named | phase named | first in run.json | steps readable / on disk | partial | "
        "nothing left |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (kind, phase), group in sorted(rows.items()):
        lines.append(_row(kind, phase, group))
    lines.append(_row("all", "", list(results)))
    for found in results:
        wrong = [name for name in _HELD if not found["missed"] and not found[name]]
        if wrong:
            lines.append(
                f"\n{found['kind']} in {found['phase']} on rank {found['rank']} after "
                f"{found['after_ms']} ms: not {', '.join(wrong)}; left {found['left']}; said:\n"
                f"{found['said']}\n{found.get('analysis', '')}"
            )
    return "\n".join(lines)


def _row(kind: str, phase: str, group: list[dict[str, Any]]) -> str:
    real = [found for found in group if not found["missed"]]
    seconds = [found["seconds"] for found in real] or [float("nan")]

    def count(name: str) -> str:
        return f"{sum(found[name] for found in real)}/{len(real)}"

    on_disk = sum(found.get("on_disk") or 0 for found in real)
    readable = sum(found.get("readable") or 0 for found in real)
    due = [found for found in real if _is_due(found)]
    kept = f"{sum(found['kept'] for found in due)}/{len(due)}"
    cells = [
        *(kind, phase, str(len(group)), str(len(group) - len(real)), count("in_time")),
        *(f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}", count("named_rank")),
        *(count("named_cause"), count("named_phase"), kept, f"{readable}/{on_disk}"),
        *(count("marked"), count("clean")),
    ]
    return f"| {' | '.join(cells)} |"


# -- a long run --------------------------------------------------------------------------------


def long_run(steps: int) -> dict[str, Any]:
    """Measures memory, file size and cost of a run of many steps at dp = 2."""
    samples: list[dict[str, Any]] = []

    def watch(process: subprocess.Popen[bytes], folder: Path) -> None:
        def sample() -> None:
            while process.poll() is None:
                ranks = {}
                for child in psutil.Process(process.pid).children():
                    try:
                        ranks[child.environ().get("RANK", "?")] = child.memory_info().rss
                    except psutil.Error:
                        continue
                size = sum(path.stat().st_size for path in folder.glob("rank-*.arrows"))
                samples.append({"s": time.monotonic(), "rss": ranks, "bytes": size})
                time.sleep(0.5)

        threading.Thread(target=sample, daemon=True).start()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        model = "timed:layers=4,parameters=20000,forward_ms=0.5,backward_ms=1"
        words = words_of(folder, "--steps", str(steps // 2), "--model", model, "--timeout", "60")
        ended = faultkit.launch(words, folder, limit_s=3600, act=watch)
        if ended.code != 0:
            raise RuntimeError(f"the run ended with {ended.code}: {ended.err[-2000:]}")
        return _long_figures(folder, samples)


def _long_figures(folder: Path, samples: list[dict[str, Any]]) -> dict[str, Any]:
    from ddp_profiler.record.reader import read_rank
    from ddp_profiler.schema import Variant

    last = max(sample["bytes"] for sample in samples)
    grown = [s for s in samples if 0 < s["bytes"] < last]
    # From a fifth on: allocators and caches have warmed up.
    counted = grown[len(grown) // 5 :]
    fifth = max(1, len(counted) // 5)
    memory = {}
    for rank in ("0", "1"):
        values = [s["rss"][rank] / 2**20 for s in counted if rank in s["rss"]]
        memory[rank] = {
            "begin_mb": statistics.median(values[:fifth]),
            "end_mb": statistics.median(values[-fifth:]),
            "min_mb": min(values),
            "max_mb": max(values),
            "samples": len(values),
        }
    columns = read_rank(folder, 0).columns
    is_step = columns["kind"] == faultkit.STEP
    ms = (columns["end_ns"] - columns["begin_ns"])[is_step] / 1e6
    variant = columns["variant"][is_step]
    cost = {}
    for name, part in (
        ("first third", slice(0, len(ms) // 3)),
        ("last third", slice(-(len(ms) // 3), None)),
    ):
        plain = ms[part][variant[part] == int(Variant.PLAIN)]
        seen = ms[part][variant[part] == int(Variant.INSTRUMENTED)]
        cost[name] = {
            "plain_ms": float(statistics.median(plain)),
            "instrumented_ms": float(statistics.median(seen)),
        }
    return {
        "steps": len(ms),
        "bytes_per_step_and_rank": last / 2 / len(ms),
        "memory": memory,
        "cost": cost,
    }


def long_table(figures: dict[str, Any]) -> str:
    """Returns the figures of a long run as lines."""
    lines = [
        f"{figures['steps']} steps at dp = 2, "
        f"{figures['bytes_per_step_and_rank']:.0f} bytes a step and rank"
    ]
    for rank, found in figures["memory"].items():
        lines.append(
            f"rank {rank}: {found['begin_mb']:.1f} MB after warm-up, {found['end_mb']:.1f} MB at "
            f"the end ({found['end_mb'] - found['begin_mb']:+.1f} MB; goal 5 MB)"
        )
    for name, cost in figures["cost"].items():
        pct = 100 * (cost["instrumented_ms"] / cost["plain_ms"] - 1)
        lines.append(
            f"{name}: plain {cost['plain_ms']:.3f} ms, instrumented "
            f"{cost['instrumented_ms']:.3f} ms ({pct:+.1f} %)"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs the series, or the long run, and prints its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=benchkit.at_least(1), default=100, help="faults (100)")
    parser.add_argument("--minutes", type=float, help="begin no fault after so many")
    parser.add_argument("--faults", default=",".join(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true", help="one long run instead of faults")
    parser.add_argument("--steps", type=benchkit.at_least(100), default=20_000, help="of --long")
    benchkit.add_file_options(parser)
    options = parser.parse_args()
    kinds = options.faults.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--faults: unknown {', '.join(sorted(unknown))}")
    raw = benchkit.kept_figures(parser, options, FORMAT)
    load = os.getloadavg()[0]
    if raw is None:
        raw = {"torch": torch.__version__, "seed": options.seed, "kinds": kinds, "results": []}
    if not options.read and options.long:
        raw["long"] = long_run(options.steps)
    elif not options.read:
        if (raw["seed"], raw["kinds"]) != (options.seed, kinds):
            parser.error(f"{options.json} is of another --seed or --faults")
        begin = time.monotonic()
        for number in range(len(raw["results"]), options.times):
            if options.minutes and time.monotonic() - begin > 60 * options.minutes:
                break
            found = one(number, options.seed, kinds)
            raw["results"].append(found)
            wrong = [name for name in _HELD if not found["missed"] and not found[name]]
            print(
                f"{number + 1}/{options.times} {found['kind']} in {found['phase']}: "
                f"{found['seconds']:.1f} s {'NOT ' + ', '.join(wrong) if wrong else ''}",
                flush=True,
            )
            _keep(options.json, raw, load)
    if not options.read:
        raw = _keep(options.json, raw, load)
    print(benchkit.machine_line(raw))
    if raw["results"]:
        print(table(raw["results"]))
    if "long" in raw:
        print(long_table(raw["long"]))


def _keep(path: Path | None, raw: dict[str, Any], load: float) -> dict[str, Any]:
    whole = {**raw, **benchkit.head(FORMAT, load)}
    if path is not None:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(benchkit.finite(whole), indent=1) + "\n")
        partial.replace(path)
    return whole


if __name__ == "__main__":
    main()
