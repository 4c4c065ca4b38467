"""A script at several dp: how it is launched, and how the launches become one run."""

import sys
from datetime import datetime

import pytest

from ddp_profiler import cli, launches
from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.launches import Launch, divided, environment, plan_launches, run_launch
from ddp_profiler.load import load_summary
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.record.launches import join_launches
from ddp_profiler.schema import LevelSettings, RankPlace, Variant
from tests.unit.span_columns import Spans
from tests.unit.test_summary import add_instrumented, run_info

NOW = datetime(2026, 1, 2, 3, 4, 5).astimezone()
SCRIPT = ("train.py", "--batch-size", "64", "--lr=1")


def test_each_dp_has_a_launch_of_its_own(tmp_path):
    first, second = plan_launches((2, 1, 2), tmp_path, SCRIPT, ("--steps", "5"), None)
    assert (first.dp, second.dp) == (1, 2)
    assert first.folder != second.folder
    words = second.command
    # A port that is free, so that two studies can run at once, and that nobody else can reach.
    assert words[1:3] == ("-m", "ddp_profiler.loopback")
    assert "--nproc_per_node=2" in words
    assert words[words.index("-m", 3) :][:2] == ("-m", "ddp_profiler.run")
    assert words[-4:] == SCRIPT
    assert words[words.index("--out") + 1] == str(second.folder)


@pytest.mark.parametrize(("dp", "share"), [(1, "64"), (2, "32"), (4, "16")])
def test_the_global_batch_is_kept(tmp_path, dp, share):
    (launch,) = plan_launches((dp,), tmp_path, SCRIPT, (), "--batch-size")
    assert launch.command[-4:] == ("train.py", "--batch-size", share, "--lr=1")


def test_of_an_argument_that_is_given_twice_the_last_counts():
    words = ("train.py", "--bs=64", "--lr", "1", "--bs", "32")
    assert divided(words, "--bs", 2) == ("train.py", "--bs=64", "--lr", "1", "--bs", "16")


@pytest.mark.parametrize(
    ("words", "argument", "what"),
    [
        (SCRIPT, "--accumulate", "is not given that argument"),
        (("train.py", "--batch-size", "10"), "--batch-size", "10 cannot be divided by dp 4"),
        (("train.py", "--batch-size", "many"), "--batch-size", "'many' is not a whole number"),
        (("train.py", "--batch-size"), "--batch-size", "'' is not a whole number"),
        # The script's own name is no argument of it.
        (("--batch-size", "64"), "--batch-size", "is not given that argument"),
    ],
)
def test_what_cannot_be_kept_is_refused(words, argument, what):
    with pytest.raises(UsageError, match=what):
        divided(words, argument, 4)


def test_all_launches_have_the_same_threads(monkeypatch):
    said = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RANK", "3")
    found = environment(10_000, said.append)
    assert found["OMP_NUM_THREADS"] == "1"
    assert "RANK" not in found
    assert len(said) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(4, said.append)["OMP_NUM_THREADS"] == "7"
    assert len(said) == 1


def test_a_launch_that_fails_says_why_and_where(tmp_path):
    code = "import sys; print('starting'); sys.exit('ValueError: planted')"
    launch = Launch(2, tmp_path, tmp_path / "launches" / "dp2.log", (sys.executable, "-c", code))
    with pytest.raises(InputError, match="dp 2 ended with 1: ValueError: planted") as caught:
        run_launch(launch, {})
    assert str(launch.log) in caught.value.remedy
    assert "starting" in launch.log.read_text()


def launched(folder, dp, plain_ms, status="complete", samples=8):
    """Writes the run of one launch: dp ranks, one level."""
    paths.claim_folder(folder)
    level = LevelSettings("script", dp, samples, 1, "packed", tuple(range(dp)))
    base = run_info()
    info = run_info(
        run_id=f"launch-{dp}",
        world_size=dp,
        status=status,
        levels=(level,),
        ranks=tuple(RankPlace(r, r, 0, "host", "boot", "cpu", 17) for r in range(dp)),
        facts=(base.facts[0].__class__(**{**vars(base.facts[0]), "id": "script"}),),
    )
    writer.write_run_info(folder, info)
    for rank in range(dp):
        spans = Spans()
        for step in range(6):
            plain = {"variant": int(Variant.PLAIN), "block": 1}
            spans.step(1000 * step, 1000 * step + plain_ms, step=step, **plain)
            add_instrumented(spans, 20_000 + 100 * step, 6 + step, 65, samples, block=2)
        stream = writer.SpanWriter(folder, rank, info.run_id)
        stream.write_columns(spans.columns())
        stream.close()
    return folder


@pytest.fixture
def joined(tmp_path):
    launches = [launched(tmp_path / f"dp{dp}", dp, ms) for dp, ms in ((1, 100.0), (2, 125.0))]
    out = tmp_path / "study"
    paths.claim_folder(out)
    return out, join_launches(launches, out, {"dp": [1, 2]}, NOW)


def test_launches_become_levels_that_are_compared(joined):
    out, _ = joined
    summary = load_summary(out)
    single, double = summary.levels
    assert (single.id, double.id) == ("dp1", "dp2")
    assert double.reference == "dp1"
    # 8 samples in 100 ms, 16 in 125 ms.
    assert double.speedup == pytest.approx(1.6)
    assert double.efficiency == pytest.approx(0.8)
    assert not summary.run.partial
    assert summary.run.settings["dp"] == [1, 2]


def test_spans_are_those_of_the_launches(joined, tmp_path):
    out, info = joined
    whole = reader.read_rank(out, 0)
    assert whole.complete
    assert whole.run_id == info.run_id
    before = [reader.read_rank(tmp_path / f"dp{dp}", 0) for dp in (1, 2)]
    assert len(whole) == sum(map(len, before))
    for name, values in whole.columns.items():
        if name != "level":
            parts = [spans.columns[name].tolist() for spans in before]
            assert values.tolist() == parts[0] + parts[1]
    assert sorted(set(whole.columns["level"].tolist())) == [0, 1]


def test_a_launch_that_failed_makes_the_study_partial(tmp_path):
    folder = launched(tmp_path / "dp1", 1, 100.0, status="failed")
    out = tmp_path / "study"
    paths.claim_folder(out)
    join_launches([folder], out, {}, NOW)
    assert load_summary(out).run.partial


def study(monkeypatch, out, samples, *options):
    """Runs the command with launches of so many samples a rank at each dp; None fails."""

    def run(launch, environ):
        if samples[launch.dp] is None:
            raise InputError("The launch failed.", "See its log.")
        launched(launch.folder, launch.dp, 100.0, samples=samples[launch.dp])

    monkeypatch.setattr(launches, "run_launch", run)
    dps = ",".join(map(str, samples))
    words = ["study", "--dp", dps, "--out", str(out), *options, "--", "train.py", "--bs", "16"]
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code


@pytest.mark.parametrize(
    ("samples", "code", "said"),
    [
        ({1: 16, 2: 8}, 0, ""),
        # The argument does not do what its user believes.
        ({1: 16, 2: 16}, 1, "did not stay; observed samples a step: dp1 16, dp2 32."),
        ({1: 16, 2: 0}, 0, "not known; observed samples a step: dp1 16, dp2 not known."),
    ],
)
def test_whether_the_global_batch_stayed_is_checked(
    monkeypatch, capsys, tmp_path, samples, code, said
):
    assert study(monkeypatch, tmp_path / "run", samples, "--keep-global-batch", "--bs") == code
    out, err = capsys.readouterr()
    assert "micro-batch x acc. x dp" in out
    assert said in err
    assert ("--keep-global-batch" in err) == bool(said)


def test_without_the_wish_the_global_batch_may_grow(monkeypatch, capsys, tmp_path):
    (tmp_path / "here").mkdir()
    assert study(monkeypatch, tmp_path / "here" / ".." / "run", {1: 16, 2: 16}) == 0
    out, err = capsys.readouterr()
    assert "--keep-global-batch" not in err
    assert f"Run folder: {(tmp_path / 'run').resolve()}\n" in out


def test_what_was_measured_before_a_launch_failed_can_be_found(monkeypatch, capsys, tmp_path):
    assert study(monkeypatch, tmp_path / "run", {1: 16, 2: None}) == 3
    err = capsys.readouterr().err
    assert f"dp 1 is kept: ddp-profiler analyze {tmp_path / 'run'}" in err
    assert [level.dp for level in load_summary(tmp_path / "run").levels] == [1]
    # Where there is nothing, nothing is promised, and the folder is given back.
    assert study(monkeypatch, tmp_path / "none", {1: None, 2: 8}) == 3
    assert "is kept" not in capsys.readouterr().err


def test_a_launch_without_a_level_is_refused(tmp_path):
    folder = tmp_path / "dp1"
    paths.claim_folder(folder)
    writer.write_run_info(folder, run_info(levels=()))
    with pytest.raises(InputError, match="holds 0 levels"):
        join_launches([folder], tmp_path, {}, NOW)


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        (["W1201 run.py", "  File errors/__init__.py", "[rank0]: ValueError: planted"], "planted"),
        (["errors.ChildFailedError: x", "ddp_profiler.run: There is no script x."], "no script x"),
        (["Killed"], "Killed"),
        ([], "no output"),
    ],
)
def test_the_line_that_says_most_is_the_cause(tmp_path, printed, cause):
    code = f"import sys; print(*{printed!r}, sep=chr(10)) if {printed!r} else None; sys.exit(1)"
    launch = Launch(1, tmp_path, tmp_path / "launches" / "dp1.log", (sys.executable, "-c", code))
    with pytest.raises(InputError, match=cause):
        run_launch(launch, {})
