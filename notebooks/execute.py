"""Runs notebooks and keeps their outputs: ``python notebooks/execute.py [NOTEBOOK...]``.

Without names, all of this folder. They run in a copy of the folder, so that runs that they make
are left nowhere. What is kept is the same from machine to machine but for the numbers: no times
of execution, and no notebook is kept whose outputs name this machine, its user or its folders.
"""

from __future__ import annotations

import getpass
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
_SECONDS_A_CELL = 300
_COMMON_NAMES = frozenset(("root", "user", "localhost", "node0"))
"""Names of users and hosts that tell nothing, and that are words as well."""


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Runs a notebook from begin to end and returns it with its outputs.

    Args:
        path: The notebook.
        folder: Where to run it: a copy of this folder is made there.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised.
    """
    place = folder / "notebooks"
    if not place.exists():
        shutil.copytree(FOLDER, place, ignore=shutil.ignore_patterns("runs", ".*", "__pycache__"))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=_SECONDS_A_CELL,
        kernel_name="python3",
        record_timing=False,
        # Otherwise what one cell prints is cut by the clock.
        coalesce_streams=True,
        resources={"metadata": {"path": str(place)}},
    )
    client.execute()
    # The exact version of Python would change with the machine.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def texts(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Yields all text of a notebook's outputs."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.get("text", "")
            yield from output.get("traceback", ())
            for kind, value in output.get("data", {}).items():
                if not kind.startswith("image/"):
                    yield str(value)


def told_of_the_machine(notebook: nbformat.NotebookNode) -> set[str]:
    """Returns what a notebook's outputs tell of the machine: names and absolute folders."""
    names = {socket.gethostname(), getpass.getuser()} - _COMMON_NAMES
    everything = "\n".join(texts(notebook))
    found = {name for name in names if re.search(rf"\b{re.escape(name)}\b", everything)}
    folders = r"(?<![\w./<:])/(?:[\w.-]+/)+[\w.-]*"
    return found | set(re.findall(folders, everything))


def main(*names: str) -> None:
    """Runs notebooks and keeps their outputs.

    Args:
        names: Which; all of this folder where none is given.
    """
    for path in sorted(map(Path, names) if names else FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        if told := told_of_the_machine(notebook):
            sys.exit(f"{path} is not kept: its outputs name {', '.join(sorted(told))}.")
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
