"""Which part may import which. The contracts are in pyproject.toml, [tool.importlinter]."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ddp_profiler"
HEAVY = ("torch", "numpy", "scipy", "pyarrow", "matplotlib")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    arguments = ["--no-cache", "--no-logo", str(folder / "pyproject.toml")]
    return subprocess.run(
        [sys.executable, "-c", command, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_rules_hold():
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 broken" in found.stdout


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory):
    """The project's contracts over a package of the same modules, all empty."""
    folder = tmp_path_factory.mktemp("skeleton")
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for path in PACKAGE.rglob("*.py"):
        file = folder / path.relative_to(ROOT)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder


def test_skeleton_is_clean(skeleton):
    found = lint(skeleton)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("part", "line", "contract"),
    [
        ("errors", "import numpy", "errors, batch, naming, units, schema and config"),
        ("schema", "from ddp_profiler import config", "Imports go one way"),
        ("measure/__init__", "import ddp_profiler.record.writer", "measure and workload know"),
        ("workload/__init__", "import ddp_profiler.measure", "Imports go one way"),
        ("record/__init__", "import torch", "What reads and shows a record works without torch"),
        ("trace/__init__", "import torch", "What reads and shows a record works without torch"),
        ("trace/__init__", "import ddp_profiler.analysis", "Imports go one way"),
        ("analysis/__init__", "import pyarrow", "analysis knows schema and units"),
        ("report/__init__", "import ddp_profiler.record.reader", "report knows results"),
        ("predict/__init__", "import ddp_profiler.report", "Imports go one way"),
        ("load", "import ddp_profiler.measure", "Imports go one way"),
        ("load", "import ddp_profiler.cli", "Imports go one way"),
        # An import inside a function, or for a type checker only, is an import.
        ("cli/__init__", "def f():\n    import ddp_profiler.run", "Imports go one way"),
        (
            "record/__init__",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ddp_profiler.load",
            "Imports go one way",
        ),
        ("record/reader", "import ddp_profiler.record.writer", "No import cycles"),
        ("newcomer", "", "Imports go one way"),
    ],
)
def test_violation_is_caught(skeleton, part, line, contract):
    file = skeleton / "ddp_profiler" / f"{part}.py"
    new = not file.exists()
    other = skeleton / "ddp_profiler" / "record" / "writer.py"
    if "cycles" in contract:
        other.write_text("import ddp_profiler.record.reader\n")
    file.write_text(f"{line}\n")
    try:
        found = lint(skeleton)
    finally:
        other.write_text("")
        file.write_text("")
        if new:
            file.unlink()
    assert found.returncode == 1, found.stdout + found.stderr
    broken = [line for line in found.stdout.splitlines() if contract in line]
    assert broken, found.stdout


def test_no_cycles_even_for_type_checkers():
    """Also cycles through imports in functions and below TYPE_CHECKING."""
    graph = grimp.build_graph("ddp_profiler", cache_dir=None, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imports.values())) > 50
    # Raises CycleError, naming the cycle.
    assert list(graphlib.TopologicalSorter(imports).static_order())


def test_type_checking_only_names_what_is_loaded_late():
    """TYPE_CHECKING is for the types of names that a package's __getattr__ loads late."""
    users = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "TYPE_CHECKING" in names and "__getattr__" not in functions:
            users.append(path.name)
    assert not users


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["analyze", "--help"], ["merge", "--help"], ["plan", "--help"]],
)
def test_help_imports_nothing_heavy(arguments):
    code = f"""
import sys
from ddp_profiler.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    print("exit", end.code, *(m for m in {HEAVY!r} if m in sys.modules), sep="|")
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.splitlines()[-1] == "exit|0"


def test_analysis_of_a_run_imports_no_torch():
    code = "import sys, ddp_profiler.cli.analyze; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "False"


def test_run_help_imports_no_torch():
    code = """
import sys
from ddp_profiler import run
run.main(["--help"])
print("torch" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.splitlines()[-1] == "False"
