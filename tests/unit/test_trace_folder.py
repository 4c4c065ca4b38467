"""``trace --out``: the folder has what was printed, and pictures of what it says."""

import json
from dataclasses import replace

import pytest
from matplotlib.patches import Rectangle

from ddp_profiler import cli
from ddp_profiler.report import trace_plots
from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.gather import read_ranks

from .kineto import Recording
from .traced_job import make_job

LATE_NS = 250_000


@pytest.fixture
def job(tmp_path):
    """A job of 3 ranks in which rank 2 joins late, by 0.25 ms each time."""
    made = make_job(world=3, lag=lambda step, place, rank: LATE_NS * (rank == 2))
    return made.write(tmp_path / "traces")


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", *map(str, arguments)])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_folder_holds_what_is_printed(job, tmp_path, capsys):
    folder = tmp_path / "new" / "report"
    code, out, err = call(capsys, job, "--out", folder)
    assert code == 0, err
    names = ["trace.json", "trace.txt", "plots/step_parts.png", "plots/waiting.png"]
    assert out == (folder / "trace.txt").read_text() + "".join(
        f"  {folder / name}\n" for name in names
    )
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names[2:])
    code, out, _ = call(capsys, job, "--json", "--out", tmp_path / "other")
    assert (tmp_path / "other" / "trace.json").read_text() == out
    assert json.loads(out) == json.loads((folder / "trace.json").read_text())


def test_nothing_is_overwritten(job, tmp_path, capsys):
    for taken in (job, job / "rank0.json"):
        code, out, err = call(capsys, job, "--out", taken)
        assert (code, out) == (2, "")
        assert "overwritten" in err
    (tmp_path / "empty").mkdir()
    assert call(capsys, job, "--out", tmp_path / "empty")[0] == 0


def bars(figure):
    """Heights by the label of their series."""
    (axes,) = figure.axes
    return {
        container.get_label(): [
            patch.get_height() for patch in container.patches if isinstance(patch, Rectangle)
        ]
        for container in axes.containers
    }


def test_parts_of_a_step_add_up_to_its_window(job):
    found = read_ranks([job])
    analysis = analyse(found)
    heights = bars(trace_plots.step_parts(found, analysis))
    windows = [
        sum(step.parts.window_ns for step in rank.steps if not step.step.incomplete)
        / sum(not step.step.incomplete for step in rank.steps)
        / 1e6
        for rank in found.ranks
    ]
    assert [sum(one) for one in zip(*heights.values(), strict=True)] == pytest.approx(windows)
    # The late one waits for nobody.
    assert heights["exposed wait"][2] < 0.01 < heights["exposed wait"][0]


def test_waiting_names_the_late_rank(job):
    found = read_ranks([job])
    analysis = analyse(found)
    figure = trace_plots.waiting(found, analysis)
    heights = bars(figure)
    late = {one.rank: one.caused_ns / 1e6 for one in analysis.across.lateness}
    assert heights["others waited"] == pytest.approx([late[rank] for rank in range(3)])
    # 9 collectives.
    assert heights["others waited"] == pytest.approx([0, 0, 9 * LATE_NS / 1e6], abs=0.05)
    assert heights["waited"][:2] == pytest.approx([9 * LATE_NS / 1e6] * 2, abs=0.05)
    assert "rank 2" in figure.get_suptitle()


def gloo(tmp_path):
    made = Recording(rank=0, world_size=2, backend="gloo")
    made.step(0, 0, 10_000_000)
    made.event("user_annotation", "gloo:all_reduce", 1_000_000, 4_000_000)
    return read_ranks([made.write(tmp_path / "rank0.json")])


def test_on_the_cpu_overlap_is_not_made_up(tmp_path):
    found = gloo(tmp_path)
    heights = bars(trace_plots.step_parts(found, analyse(found)))
    assert heights == {"communication": [4.0], "rest": [6.0]}
    assert trace_plots.waiting(found, analyse(found)) is None


def test_many_ranks_are_cut_and_that_is_said(tmp_path):
    one = gloo(tmp_path)
    many = replace(one, ranks=tuple(replace(one.ranks[0], rank=rank) for rank in range(70)))
    figure = trace_plots.step_parts(many, analyse(one))
    assert len(bars(figure)["communication"]) == 64
    assert "the first 64 ranks" in figure.get_suptitle()
