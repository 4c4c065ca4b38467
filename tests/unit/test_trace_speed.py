"""The arithmetic of ``benchmarks/trace_speed.py``; no figure of it is judged here."""

import gzip
import importlib.util
import sys
from pathlib import Path

import pytest

from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split

from .kineto import training

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trace_speed.py"


@pytest.fixture(scope="module")
def speed():
    spec = importlib.util.spec_from_file_location("trace_speed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_speed"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["trace_speed"]


def test_a_repeated_trace_is_a_longer_recording(speed, tmp_path):
    made, _ = training(3, steps=5)
    # Whole us, as in the trace that is repeated.
    for event in made.events:
        for name in ("ts", "dur"):
            event[name] = int(float(event[name].strip("@")))
    source = tmp_path / "once.json.gz"
    source.write_bytes(gzip.compress(made.text()))
    once = split(read_trace(source), 0)
    target = tmp_path / "often.json.gz"
    speed.write_repeated(source, target, times=4)
    often = split(read_trace(target), 0)
    assert [step.step.number for step in often.steps] == list(range(20))
    for name in ("compute_ns", "comm_ns", "overlap_ns", "memory_ns"):
        assert getattr(often.total, name) == 4 * getattr(once.total, name)
        figures = [getattr(step.parts, name) for step in often.steps]
        assert figures == 4 * [getattr(step.parts, name) for step in once.steps]


def runs(speed, ours=(0.2, 30), floor=0.2, hta=(4.0, 300), ten=(2.0, 32)):
    return [
        run
        for _ in range(3)
        for run in (
            speed.Run("ours", "once", 9.0, *ours, None),
            speed.Run("floor", "once", 9.0, floor, 100, None),
            speed.Run("hta", "once", 9.0, *hta, None),
            speed.Run("ours", "repeated", 9.0, *ten, None),
        )
    ]


def test_goals_are_judged_by_what_came_out(speed):
    sizes = {"once": 10, "repeated": 100}
    assert [goal.met for goal in speed.goals(runs(speed), sizes)] == [True] * 5
    worse = runs(speed, ours=(0.5, 200), ten=(9.0, 250))
    assert [goal.met for goal in speed.goals(worse, sizes)] == [False] * 5
    large = [*runs(speed), speed.Run("ours", "large", 9.0, 20.0, 1100, None)]
    assert [goal.met for goal in speed.goals(large, sizes)][-1] is False


def test_the_table_fits(speed):
    raw = {
        "when": "now",
        "machine": "2 cores",
        "rounds": 3,
        "sizes": {"once": 53_700_000, "repeated": 537_000_000},
        "runs": [vars(run) for run in runs(speed)],
    }
    lines = speed.render(raw).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.endswith("yes") for line in lines) == 5


def test_wrong_usage(speed, tmp_path, monkeypatch, capsys):
    for arguments in ([], [str(tmp_path)], ["--read", str(tmp_path / "none")]):
        monkeypatch.setattr(sys, "argv", ["trace_speed.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            speed.main()
        assert ended.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
