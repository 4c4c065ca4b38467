"""The notebooks run from begin to end, their own claims hold, and their outputs are kept."""

import json
import sys

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from nbclient.exceptions import CellExecutionError  # noqa: E402

from .conftest import ROOT  # noqa: E402

FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))
try:
    import execute as kept
finally:
    sys.path.remove(str(FOLDER))

NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook):
    """What each cell shows: a stream, or the types of a result."""
    return [
        [sorted(out.data) if "data" in out else out.output_type for out in cell.outputs]
        for cell in code(notebook)
    ]


@pytest.fixture(autouse=True)
def users_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Settings of the user's own, such as another backend of matplotlib, are not to matter.
    for name in ("HOME", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("MPLBACKEND", raising=False)


def test_they_are_all_there():
    assert NOTEBOOKS == [
        "batch_and_training_time.ipynb",
        "run_folder_to_frames.ipynb",
        "scaling_study.ipynb",
    ]
    listed = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in NOTEBOOKS)


@pytest.mark.distributed
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_and_its_claims_hold(name, tmp_path):
    path = FOLDER / name
    before = {one.name for one in FOLDER.iterdir()}
    saved = nbformat.read(path, as_version=4)
    # Raises where a cell does: each claim is an assert in it.
    fresh = kept.execute(path, tmp_path)
    assert kinds(fresh) == kinds(saved)
    assert kept.told_of_the_machine(fresh) == set()
    # Nothing is left beside the originals.
    assert {one.name for one in FOLDER.iterdir()} == before


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_kept(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(out.output_type != "error" for cell in cells for out in cell.outputs)
    assert kept.told_of_the_machine(notebook) == set()
    assert sum("image/png" in json.dumps(out) for cell in cells for out in cell.outputs) >= 2
    # A claim for most questions, and a sentence before each cell or two.
    assert sum("assert " in cell.source for cell in cells) >= len(cells) / 2
    assert sum(cell.cell_type == "markdown" for cell in notebook.cells) >= len(cells) / 2


def written(folder, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path = folder / "planted.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.distributed
def test_a_claim_that_does_not_hold_is_seen(tmp_path):
    path = written(tmp_path, "assert 1 + 1 == 2", "assert 1 + 1 == 3")
    with pytest.raises(CellExecutionError, match=r"1 \+ 1 == 3"):
        kept.execute(path, tmp_path)


@pytest.mark.distributed
def test_what_a_slow_cell_prints_is_one_output(tmp_path):
    # A kernel hands over what was printed every 0.2 s, so that a busy machine cuts it anywhere.
    source = "import time\nprint(1, flush=True)\ntime.sleep(1)\nprint(2)"
    fresh = kept.execute(written(tmp_path, source), tmp_path)
    assert [out.text for out in fresh.cells[0].outputs] == ["1\n2\n"]


def test_what_tells_of_the_machine_is_seen():
    def outputs(text):
        shown = nbformat.v4.new_output("execute_result", {"text/plain": text})
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[shown])])

    assert kept.told_of_the_machine(outputs("kept in /home/someone/runs/x now")) == {
        "/home/someone/runs/x"
    }
    assert kept.told_of_the_machine(outputs(f"in '{FOLDER}/runs'")) == {f"{FOLDER}/runs"}
    assert (
        kept.told_of_the_machine(
            outputs("runs/x, 12 ms/s, <td>1/2</td>, n/a, https://example.org/a/b")
        )
        == set()
    )
