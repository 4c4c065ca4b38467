"""Steps under torch.profiler: what is captured, and both records of them compared."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from ddp_profiler import captured, cli
from ddp_profiler.errors import InputError
from ddp_profiler.measure import kineto
from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.kineto import KinetoCapture
from ddp_profiler.measure.loop import LevelRun
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.record import paths, writer
from ddp_profiler.report import captured as report
from ddp_profiler.schema import LevelSettings, Variant
from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.compared import OwnSteps, View, compare_views
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.workload import Planter, build

from .kineto import Recording
from .span_columns import Spans
from .test_record import run_info

MS = 1_000_000
WARMUP = 2
KINETO = {"variant": int(Variant.KINETO), "block": 1_000_000}


# ----------------------------------------------------------------------------------------------
# Both records of steps made by hand: 3 steps of 100 ms after 2 of warm-up


def trace(path, rank=0, *, stretch=1.0, steps=(2, 3, 4), events=((50, 65), (60, 70), (80, 90)),
          world_size=2, sizes=True, more=()):  # fmt: skip
    """A trace of gloo with collectives that are in flight from begin to end, in ms."""
    made = Recording(rank=rank, world_size=world_size, backend="gloo")
    for number in steps:
        at = 100 * MS * number
        made.step(number, at, 100 * MS)
        for begin, end in events:
            shapes = {"Input Dims": [[250]], "Input type": ["float"]}
            made.event(
                "user_annotation", "gloo:all_reduce", at + begin * MS,
                round((end - begin) * MS * stretch), tid=9, **(shapes if sizes else {}),
            )  # fmt: skip
        for name, begin, end, dtype in more:
            made.event(
                "user_annotation", name, at + begin * MS, (end - begin) * MS, tid=10,
                **{"Input Dims": [[7]], "Input type": [dtype]},
            )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    return made.write(path)


def record(*, steps=5, level=0):
    """Spans in which collectives are in flight for 30 of 100 ms; all 100 in the warm-up."""
    spans = Spans(level=level, **KINETO)
    for step in range(steps):
        at = 100 * step
        spans.data(at, at + 10, step=step).forward(at + 10, at + 40, step=step)
        spans.backward(at + 40, at + 75, at + 95, step=step)
        for begin, end in ((50, 65), (60, 70), (80, 90)) if step >= WARMUP else ((40, 95),):
            spans.gradient(at + begin, at + end, step=step)
        spans.step(at, at + 100, step=step)
    return spans


def own(spans=None):
    return captured.own_steps(0, (spans or record()).columns(), 0)


def compared(tmp_path, spans=None, dp=2, **how):
    (split,) = read_ranks([trace(tmp_path / "rank-00000.json.gz", **how)]).ranks
    return compare_views(split, own(spans), dp)


def test_equal_records_agree(tmp_path):
    found = compared(tmp_path)
    assert [step.step for step in found.steps] == [2, 3, 4]
    # The union: 20 ms of two that overlap, and 10 ms.
    assert found.ours == found.theirs == View(90 * MS, 9, 9000)
    assert found.difference_pct == pytest.approx(0)
    assert found.notes == ()


def test_planted_difference_is_found(tmp_path):
    # 50 to 65 and 80 to 90: 25 ms; ours has 30.
    found = compared(tmp_path, events=((50, 65), (52, 60), (80, 90)))
    assert found.theirs == View(75 * MS, 9, 9000)
    assert found.difference_pct == pytest.approx(20)
    assert [step.theirs.in_flight_ns for step in found.steps] == [25 * MS] * 3


def test_what_is_no_gradient_is_left_out(tmp_path):
    more = (("gloo:broadcast", 10, 20, "float"), ("gloo:all_reduce", 95, 99, "long int"))
    assert compared(tmp_path, more=more).theirs == View(90 * MS, 9, 9000)


def test_another_number_of_collectives_is_told(tmp_path):
    few = compared(tmp_path, events=((50, 65), (60, 70)))
    assert (few.ours.collectives, few.theirs.collectives) == (9, 6)
    assert few.notes == ("the numbers of collectives differ",)
    spans = record()
    spans.backward_comm(441, 442, step=4)
    (note,) = compared(tmp_path, spans, more=(("gloo:all_reduce", 41, 42, "float"),)).notes
    assert "modules and DDP itself" in note


def test_only_steps_in_both_are_compared(tmp_path):
    found = compared(tmp_path, steps=(3, 4, 5))
    assert [step.step for step in found.steps] == [3, 4]
    assert found.ours.in_flight_ns == 60 * MS
    none = compared(tmp_path, steps=(7, 8))
    assert (none.steps, none.theirs, none.difference_pct) == ((), None, None)
    assert none.notes == ("the trace and the record have no step in common",)


def test_at_dp_1_what_is_in_flight_is_not_compared(tmp_path):
    found = compared(tmp_path, dp=1)
    assert (found.difference_pct, found.theirs.collectives) == (None, 9)
    assert "nothing travels" in found.notes[0]


def test_sizes_that_are_not_recorded_are_not_made_up(tmp_path):
    found = compared(tmp_path, sizes=False)
    assert (found.ours.bytes, found.theirs.bytes) == (9000, None)
    assert found.difference_pct == pytest.approx(0)


def test_a_trace_without_steps_is_not_compared(tmp_path):
    made = Recording(rank=0, backend="gloo")
    made.event("user_annotation", "gloo:all_reduce", 0, 5 * MS)
    (split,) = read_ranks([made.write(tmp_path / "rank0.json")]).ranks
    found = compare_views(split, own(), 2)
    assert (found.theirs, found.difference_pct) == (None, None)
    assert "does not tell" in found.notes[0]


def test_no_communication_gives_no_difference(tmp_path):
    (split,) = read_ranks([trace(tmp_path / "rank0.json", events=((5, 5),))]).ranks
    zero = np.zeros(5, np.int64)
    assert compare_views(split, OwnSteps(zero, zero, zero, zero), 2).difference_pct is None


def test_completions_that_were_not_noticed_are_told(tmp_path):
    spans = record()
    spans.gradient(450, None, step=4)
    found = compared(tmp_path, spans)
    assert any("1 completions were not noticed" in note for note in found.notes)


# ----------------------------------------------------------------------------------------------
# Run folders


LEVELS = (
    LevelSettings("dp1", 1, 8, 1, "packed", (0,)),
    LevelSettings("dp2-spread", 2, 8, 1, "spread", (0, 2)),
)


@pytest.fixture
def run(tmp_path):
    """A run of 4 ranks; rank 2's trace is 20 % shorter than our record at the second level."""
    folder = tmp_path / "run"
    paths.claim_folder(folder)
    info = run_info(run_id="run-1", status="complete", world_size=4, levels=LEVELS)
    writer.write_run_info(folder, info)
    for rank in (0, 2):
        stream = writer.SpanWriter(folder, rank, "run-1")
        for level in range(2):
            stream.write_columns(record(level=level).columns())
        stream.close()
    trace(paths.kineto_file(folder, "dp1", 0), 0, world_size=4)
    for rank in (0, 2):
        events = ((50, 65), (52, 60), (80, 90)) if rank else ((50, 65), (60, 70), (80, 90))
        trace(paths.kineto_file(folder, "dp2-spread", rank), rank, world_size=4, events=events)
    return folder


def test_each_level_of_a_run_is_compared(run):
    found = captured.read_captured(run)
    assert [level.level for level in found.levels] == ["dp1", "dp2-spread"]
    assert found.without == ()
    differences = [[one.difference_pct for one in level.compared] for level in found.levels]
    assert differences == [[None], [pytest.approx(0), pytest.approx(20)]]


def test_ranks_outside_a_level_are_not_missing(run):
    for level in captured.read_captured(run).levels:
        assert level.found.missing == ()
        assert "missing_ranks" not in {warning.code for warning in level.found.warnings}
    assert [level.found.world_size for level in captured.read_captured(run).levels] == [
        1,
        2,
    ]


def test_ranks_of_a_level_are_missing(run):
    info = replace(run_info(run_id="run-1", world_size=4), levels=(
        LEVELS[0], replace(LEVELS[1], dp=3, ranks=(0, 2, 3)),
    ))  # fmt: skip
    writer.write_run_info(run, info)
    assert captured.read_captured(run).levels[1].found.missing == (3,)


def test_levels_without_traces_are_named(run, capsys):
    paths.kineto_file(run, "dp1", 0).unlink()
    assert captured.read_captured(run).without == ("dp1",)
    assert "No traces of level dp1" in shown(run, capsys)


def test_a_run_without_traces_is_refused(run):
    for level in LEVELS:
        for file in paths.kineto_files(run, level.id):
            file.unlink()
    with pytest.raises(InputError, match="holds no traces") as raised:
        captured.read_captured(run)
    assert "--kineto" in raised.value.remedy


def test_without_our_record_there_are_only_the_traces(run, capsys):
    for file in paths.rank_files(run).values():
        file.unlink()
    assert [level.compared for level in captured.read_captured(run).levels] == [(), ()]
    assert "no comparison" in shown(run, capsys)


def test_traces_of_other_ranks_and_records_of_other_runs_are_refused(run):
    trace(paths.kineto_file(run, "dp1", 0), 3, world_size=4)
    with pytest.raises(InputError, match="rank 3, which is not one of level dp1"):
        captured.read_captured(run)
    trace(paths.kineto_file(run, "dp1", 0), 0, world_size=4)
    stream = writer.SpanWriter(run, 0, "run-2")
    stream.close()
    with pytest.raises(InputError, match="belongs to the run run-2"):
        captured.read_captured(run)


def test_a_folder_with_traces_is_taken(tmp_path):
    (tmp_path / paths.KINETO_FOLDER).mkdir()
    assert paths.holds_run(tmp_path)


def shown(folder, capsys, *options):
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", str(folder), *options])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return out


def test_the_command_shows_both_records(run, capsys):
    out = shown(run, capsys)
    assert max(map(len, out.splitlines())) <= 80
    assert [line for line in out.splitlines() if line.startswith("Level ")] == [
        "Level dp1, under torch.profiler",
        "Level dp2-spread, under torch.profiler",
    ]
    rows = [line.split() for line in out.splitlines() if "kB, " in line]
    assert rows == [
        ["0", "3", "30.0", "30.0", "-", "9,", "9", "9.0", "kB,", "9.0", "kB"],
        ["0", "3", "30.0", "30.0", "+0.0", "%", "9,", "9", "9.0", "kB,", "9.0", "kB"],
        ["2", "3", "30.0", "25.0", "+20.0", "%", "9,", "9", "9.0", "kB,", "9.0", "kB"],
    ]


def test_the_json_of_a_run(run, capsys):
    found = json.loads(shown(run, capsys, "--json"))
    assert [level["level"] for level in found["levels"]] == ["dp1", "dp2-spread"]
    assert [rank["rank"] for rank in found["levels"][1]["ranks"]] == [0, 2]
    last = found["compared"][-1]
    assert (last["level"], last["rank"]) == ("dp2-spread", 2)
    assert last["ours"] == {"in_flight_us": 90_000, "collectives": 9, "bytes": 9000}
    assert last["theirs"] == {"in_flight_us": 75_000, "collectives": 9, "bytes": 9000}
    assert last["difference_pct"] == pytest.approx(20)
    assert [step["step"] for step in last["steps"]] == [2, 3, 4]


def test_the_json_of_a_run_is_exact_and_made_piece_by_piece(run, capsys, tmp_path):
    """Times since 1970 have more digits than a double; nothing is held whole."""
    folder = paths.kineto_folder(run, "dp1")
    one_level = shown(folder, capsys, "--json")
    text = shown(run, capsys, "--json")
    exact = set(re.findall(r'"begin_us": (\d{13,}\.\d{3})\b', one_level))
    assert exact
    assert exact <= set(re.findall(r'"begin_us": (\d{13,}\.\d{3})\b', text))
    assert '"in_flight_us": 75000.000' in text
    found = captured.read_captured(run)
    content = report._content(found, [analyse(level.found) for level in found.levels], None)
    assert isinstance(content["levels"], Iterator)
    assert isinstance(next(content["levels"])["collectives"], Iterator)


def test_a_timeline_of_several_levels_is_refused_before_all_is_read(
    run, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("ddp_profiler.captured.read_ranks", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", str(run), "--timeline", str(tmp_path / "t.json")])
    assert ended.value.code == 2
    assert "has traces of 2 levels; a timeline is of one" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--rank", "0"), ("--timeline", "t.json.gz"), (".",)])
def test_options_that_a_run_does_not_take(run, options, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", str(run), *options])
    assert ended.value.code == 2
    assert "kineto/" in capsys.readouterr().err
    assert not (tmp_path / "t.json.gz").exists()


def test_a_folder_of_one_level_can_be_named(run, capsys):
    out = shown(paths.kineto_folder(run, "dp1"), capsys)
    assert "Level" not in out


# ----------------------------------------------------------------------------------------------
# torch.profiler itself, in a group of one


@pytest.fixture
def trained(process_group, tmp_path):
    """Returns a function that trains a block under a capture and returns the block's columns."""

    def train(capture, steps):
        kept = []
        level = LevelSettings("dp1", 1, 4, 1, "packed", (0,))
        run = LevelRun(
            level,
            build("mlp:width=32,depth=3", seed=0, micro_batch=4, data=None),
            Recorder(HostTimeline(), kept.append),
            torch.distributed.group.WORLD,
            0,
            torch.device("cpu"),
            bucket_cap_mb=0.005,
            precision="fp32",
            seed=0,
            planter=Planter((), 0),
        )
        run.recorder.begin_block(0, 0, 0, Variant.KINETO)
        capture.begin()
        run.run_block(steps, Variant.KINETO, beat=capture.step)
        capture.end()
        run.close()
        (block,) = kept
        null = np.iinfo(np.int64).min
        return {
            name: np.array([null if value is None else value for value in values])
            for name, values in block.items()
        }

    return train


def new_capture(target):
    return KinetoCapture(WARMUP, 3, torch.device("cpu"), target)


def test_what_torch_profiler_records_is_what_we_record(trained, tmp_path, recwarn):
    target = tmp_path / "kineto" / "dp1" / "rank-00000.json.gz"
    capture = new_capture(target)
    columns = trained(capture, WARMUP + 3)
    assert capture.problem == ""
    assert [str(warning.message) for warning in recwarn] == []
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    (split,) = read_ranks([target]).ranks
    assert split.trace.rank == 0
    found = compare_views(split, captured.own_steps(0, columns, 0), 1)
    assert [step.step for step in found.steps] == [2, 3, 4]
    assert [note.partition(" at ")[0] for note in found.notes] == ["nothing travels"]
    for step in found.steps:
        assert step.ours.collectives == step.theirs.collectives > 1
        assert step.ours.bytes == step.theirs.bytes > 0
        assert step.theirs.in_flight_ns > 0


class Broken:
    """A torch.profiler that works until it is asked for one thing."""

    def __init__(self, what, **settings):
        self.what, self.inner = what, torch.profiler.profile(**settings)

    def __getattr__(self, name):
        return self.fail if name == self.what else getattr(self.inner, name)

    @staticmethod
    def fail(*_):
        raise RuntimeError("planted\nsecond line")


@pytest.mark.parametrize("what", ["start", "step", "stop", "export_chrome_trace"])
def test_a_failure_of_torch_profiler_changes_nothing_else(what, trained, tmp_path, monkeypatch):
    target = tmp_path / "dp1" / "rank-00000.json.gz"
    monkeypatch.setattr(kineto, "profile", lambda **settings: Broken(what, **settings))
    capture = new_capture(target)
    columns = trained(capture, WARMUP + 3)
    assert capture.problem == "RuntimeError: planted"
    assert len(captured.own_steps(0, columns, 0).collectives) == WARMUP + 3
    assert not list(tmp_path.rglob("*json*"))
    monkeypatch.undo()
    # Nothing is left at work: another capture works.
    again = new_capture(target)
    trained(again, WARMUP + 3)
    assert again.problem == ""
    assert target.is_file()
