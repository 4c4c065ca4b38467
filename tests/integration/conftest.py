"""Starts the product's own commands as a user would, and measures again where noise was."""

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str
    folder: Path | None = None

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def run_info(self):
        return json.loads((self.folder / "run.json").read_text())

    def level(self, name):
        return next(level for level in self.summary["levels"] if level["id"] == name)


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(env):
    """Returns this process's environment without a launcher's variables, and with ``env``."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return {
        name: value
        for name, value in merged.items()
        if name not in LAUNCHERS or name in (env or {})
    }


def run_command(argv, *, cwd=None, env=None, timeout=170):
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd or ROOT,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def torchrun(ranks, *argv, **keywords):
    """Runs ``python ARGV`` on each rank, as users do."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    # Its first argument is a module or a file itself.
    return run_command([*start, *argv], **keywords)


def unaborted(launch, most=5):
    """Returns the end of a script that ends by itself, and not by a part of us.

    Torch's own threads abort the end of some such processes (exit code -6): one of gloo's lets go
    of the last backward's work while the interpreter is ending (pytorch#190489). Scripts are to
    stay as users write them, so a launch that ends so is made again, and no other.

    Args:
        launch: Launches the script and returns its end; a second one may find what the first left.
        most: How often it may be launched.
    """
    for _ in range(most):
        done = launch()
        if done.code == 0 or "terminate called without an active exception" not in done.err:
            break
    return done


OF_THE_MACHINE = frozenset(
    ("straggler", "passing-straggler", "cores-shared", "cpu-steal", "cpu-throttled")
)
"""Findings that a busy machine makes in a run in which nothing was planted."""


def serious(summary):
    """Returns a run's errors and warnings, without those that a busy machine makes."""
    found = [f for f in summary["findings"] if f["severity"] in ("error", "warning")]
    return [f for f in found if f["id"] not in OF_THE_MACHINE]


def load_benchmark(name):
    """Returns a benchmark as a module, to try its arithmetic on figures of ours."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


class Looks:
    """A measurement that is taken again where a claim about it fails, and all that was seen.

    Other work on the machine lengthens what it meets: by chance, and never twice alike, while a
    wrong measurement is wrong each time. So a claim holds if one look shows it and fails only if
    every look does, after at most ``most`` looks in all, whatever the number of claims. Use it for
    bounds on times; what does not depend on the machine must hold at the first look.

    Args:
        measure: Takes the measurement; called again for another look.
        most: How often it may be taken.
    """

    def __init__(self, measure, most=3):
        self._measure = measure
        self._most = most
        self.seen = [measure()]

    @property
    def last(self):
        return self.seen[-1]

    def show(self, claim):
        """Calls a claim with one look after the other, the last one first, until it holds."""
        for look in reversed(self.seen):
            try:
                return claim(look)
            except AssertionError as error:
                failed = error
        while len(self.seen) < self._most:
            self.seen.append(self._measure())
            try:
                return claim(self.last)
            except AssertionError as error:
                failed = error
        failed.add_note(f"So in each of {len(self.seen)} looks.")
        raise failed

    @staticmethod
    def show_both(one, other, claim):
        """Calls a claim about two measurements with looks at both, as `show` does with one."""
        one.show(lambda first: other.show(lambda second: claim((first, second))))


def timed(test):
    """Lets a test of times look again: its argument that is a `Looks` becomes one look of it."""

    @functools.wraps(test)
    def run(**arguments):
        (name,) = (name for name, value in arguments.items() if isinstance(value, Looks))
        looks = arguments.pop(name)
        looks.show(lambda look: test(**{name: look}, **arguments))

    return run


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """Returns a function that runs a study and keeps equal ones."""
    known = {}

    def run(ranks, *options, again=False, **keywords):
        key = (ranks, options, repr(sorted(keywords.items())))
        if again or key not in known:
            folder = tmp_path_factory.mktemp("study") / "run"
            ours = ("-m", "ddp_profiler.run", "--out", folder, "--allreduce-max-mb", "0.1")
            finished = torchrun(ranks, *ours, *options, **keywords)
            finished.folder = folder
            known[key] = finished
        return known[key]

    return run


@pytest.fixture(scope="session")
def look(study):
    """Returns a function that runs a study, which must end well, as `Looks`."""

    def run(*arguments, **keywords):
        def measure():
            done = study(*arguments, again=True, **keywords)
            assert done.code == 0, done.err[-3000:]
            return done

        return Looks(measure)

    return run
