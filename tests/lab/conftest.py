"""The lab's own module, which is a script and not a package, and whether it can run here."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("ddp_lab", ROOT / "launch" / "lab.py")
assert _spec is not None
assert _spec.loader is not None
lab_tool = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = lab_tool
_spec.loader.exec_module(lab_tool)


@pytest.fixture(scope="session")
def usable() -> None:
    """Skips where root or a kernel feature is missing; on CI with root that is a failure."""
    problems = [f"{item.name}: {item.problem}" for item in lab_tool.check() if item.problem]
    if problems:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(f"CI must have all that the lab needs: {problems}")
        pytest.skip("; ".join(problems))
