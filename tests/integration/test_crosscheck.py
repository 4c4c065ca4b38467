"""The cross-check runs, and finds differences that are planted in spans and events."""

import json

import pytest

from ddp_profiler.schema import SPAN_COLUMNS
from tests.integration.conftest import ROOT, Looks, load_benchmark, run_command, timed
from tests.unit.span_columns import NULL, Spans

SCRIPT = ROOT / "benchmarks" / "crosscheck.py"


@pytest.fixture(scope="module")
def crosscheck():
    return load_benchmark("crosscheck")


def raw(events_ms, *, loss_ms=5, steps=3):
    """Two ranks alike. Ours is in flight for 30 of 100 ms, from 50 to 70 and from 80 to 90.

    Forward is 10 to 40, with a loss at its end; local backward 40 to 75; backward ends at 95.
    """
    spans, events, logged = Spans(), [], []
    for step in range(steps):
        at = 100 * step
        spans.data(at, at + 10, step=step).forward(at + 10, at + 40, step=step)
        spans.backward(at + 40, at + 75, at + 95, step=step)
        spans.gradient(at + 50, at + 65, step=step).gradient(at + 60, at + 70, step=step)
        spans.gradient(at + 80, at + 90, step=step)
        spans.step(at, at + 100, step=step)
        # Their clock is another one.
        events += [
            [7e12 + 1000 * (at + begin), 7e12 + 1000 * (at + end)] for begin, end in events_ms
        ]
        logged.append(
            {
                "forward": (30 - loss_ms) * 10**6,
                "backward": (35 + loss_ms) * 10**6,
                "first_to_end": 45 * 10**6,
                "overlap": 25 * 10**6,
            }
        )
    columns = spans.columns()
    rank = {
        "columns": {
            name: [None if v == NULL else int(v) for v in columns[name]] for name, _ in SPAN_COLUMNS
        },
        "events_us": events[::-1],
        "logged_ns": logged[:-1],
        "buckets": 3,
    }
    return {"cases": [{"model": "by hand", "ranks": [rank, rank]}]}


def figures(crosscheck, *arguments, **keywords):
    (result,) = crosscheck.analyze(raw(*arguments, **keywords))
    return {figure.name: figure for figure in result.figures}


def test_equal_observers_agree(crosscheck):
    found = figures(crosscheck, [(50, 65), (60, 70), (80, 90)], loss_ms=0)
    assert [f.difference_percent for f in found.values()] == pytest.approx([0] * 6)
    assert found["in flight"].ours_ms == pytest.approx(30)
    assert [found[name].steps for name in ("in flight", "forward")] == [6, 4]


def test_planted_differences_are_found(crosscheck):
    found = figures(crosscheck, [(50, 65), (60, 69), (80, 86)], loss_ms=5)
    assert found["in flight"].theirs_ms == pytest.approx(25)
    assert found["in flight"].difference_percent == pytest.approx(20)
    assert found["in flight"].step_difference_percent == pytest.approx(20)
    assert found["forward"].difference_percent == pytest.approx(20)
    assert found["backward"].difference_percent == pytest.approx(100 * (35 / 40 - 1))
    assert found["both"].difference_percent == pytest.approx(0)
    assert found["first to end"].ours_ms == found["first to end"].theirs_ms == 45


def test_another_number_of_events_is_refused(crosscheck):
    with pytest.raises(RuntimeError, match="6 events, the record 9 gradient collectives"):
        crosscheck.analyze(raw([(50, 65), (60, 70)]))


@pytest.fixture
def quick(tmp_path_factory):
    def measure():
        file = tmp_path_factory.mktemp("crosscheck") / "figures.json"
        done = run_command([SCRIPT, "--quick", "--json", file])
        assert done.code == 0, done.err[-3000:]
        return done, file

    return Looks(measure)


@pytest.mark.distributed
@pytest.mark.alone
@timed
def test_quick_run_compares_every_figure(quick):
    done, file = quick
    assert max(map(len, done.out.splitlines())) <= 80
    results = json.loads(file.read_text())["result"]
    assert [result["buckets"] > 1 for result in results] == [True] * 3
    for result in results:
        found = {figure["name"]: figure for figure in result["figures"]}
        # What both define alike, whatever the machine does.
        assert abs(found["both"]["difference_percent"]) < 20
        assert found["in flight"]["theirs_ms"] > 0
    assert run_command([SCRIPT, "--read", file]).out == done.out


def test_help_needs_no_torch():
    done = run_command(["-X", "importtime", SCRIPT, "--help"])
    assert done.code == 0
    assert "How to read the table" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "| torch" not in done.err


@pytest.mark.parametrize("options", [("--steps", "0"), ("--read", "nowhere.json")])
def test_wrong_usage(options):
    done = run_command([SCRIPT, *options])
    assert done.code == 2
    assert "Traceback" not in done.err
