"""Starts the product's own commands as a user would."""

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


def run_command(argv, *, cwd=None, env=None, timeout=170):
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in (env or {}):
            merged.pop(name, None)
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd or ROOT,
        env=merged,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def load_benchmark(name):
    """Returns a benchmark as a module, to try its arithmetic on figures of ours."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """Returns a function that runs a study under torchrun and keeps equal ones."""
    known = {}

    def run(ranks, *options, **keywords):
        key = (ranks, options, repr(sorted(keywords.items())))
        if key not in known:
            folder = tmp_path_factory.mktemp("study") / "run"
            argv = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            argv += ["-m", "ddp_profiler.run", "--out", folder]
            argv += ["--allreduce-max-mb", "0.1", *options]
            finished = run_command(argv, **keywords)
            finished.folder = folder
            known[key] = finished
        return known[key]

    return run
