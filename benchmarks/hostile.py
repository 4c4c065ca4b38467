"""Gives all readers many hostile inputs, and says what came of them.

Usage, from the repository's root:

    python benchmarks/hostile.py                       # 10,000 inputs, made from a seed
    python benchmarks/hostile.py --inputs 50000 --first 100000
    python benchmarks/hostile.py --again spans:13365   # one input again, with what it gives
    python benchmarks/hostile.py --guided trace --seconds 300   # coverage-guided; pip install
                                                                # atheris (Python 3.11)

Prints JSON; exits with 1 where something came out that must not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_BATCH = 1000
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def generated(count: int, first: int) -> dict[str, Any]:
    """Tries inputs in batches, each in a process of its own, and adds up what they show."""
    inputs: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    result: dict[str, Any] = {"slowest_s": 0.0, "most_mb": 0.0}
    failures: list[Any] = []
    for begin in range(first, first + count, _BATCH):
        size = min(_BATCH, first + count - begin)
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.hostile_inputs", str(size), str(begin)],
            cwd=ROOT,
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            failures.append([begin, "the process ended", done.stderr[-2000:]])
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        inputs.update(found["inputs"])
        codes.update(found["exit_codes"])
        failures += found["failures"]
        for name, which in (("slowest_s", "slowest"), ("most_mb", "most")):
            if found[name] > result[name]:
                result |= {name: found[name], which: found[which]}
        print(f"{begin + size - first:,} of {count:,}", file=sys.stderr)
    return {"inputs": dict(inputs), "exit_codes": dict(codes), **result, "failures": failures}


def main() -> int:
    """Runs what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--again", metavar="TARGET:NUMBER", help="one input, with all it gives")
    parser.add_argument("--guided", choices=("run.json", "spans", "trace"))
    parser.add_argument("--seconds", type=int, default=120)
    given = parser.parse_args()
    module = [sys.executable, "-m"]
    if given.again:
        words = [*module, "tests.faults.hostile_inputs", "0", "0", given.again]
        return subprocess.call(words, cwd=ROOT, env=_ENVIRONMENT)
    if given.guided:
        words = [*module, "tests.faults.guided", given.guided, str(given.seconds)]
        return subprocess.call(words, cwd=ROOT, env=_ENVIRONMENT)
    found = generated(given.inputs, given.first)
    print(json.dumps(found, indent=2))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
