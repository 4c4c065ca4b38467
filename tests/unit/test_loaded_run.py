"""A run folder as tables and figures: they hold the record's numbers, and nothing else."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

import ddp_profiler
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.load import LoadedInFull
from ddp_profiler.notebook import frames
from ddp_profiler.notebook.columns import TABLES
from ddp_profiler.notebook.loaded_run import FIGURES, LoadedRun
from ddp_profiler.predict.prediction import predictor_of
from ddp_profiler.record import paths
from ddp_profiler.record.writer import SpanWriter, write_run_info
from ddp_profiler.schema import Failure, RankPhase, Variant
from tests.unit import report_runs

pd = pytest.importorskip("pandas")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "notebooks" / "example-run"
PART_COLUMNS = [f"{part}_ms" for part in PARTS]


def write(folder, info, columns):
    folder.mkdir()
    write_run_info(folder, info)
    for rank, values in columns.items():
        writer = SpanWriter(folder, rank, info.run_id)
        writer.write_columns(values)
        writer.close()
    return folder


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """4 ranks, 20 steps of 110 ms each; rank 2 is late by 10 ms, in forward: see report_runs."""
    columns = {
        rank: report_runs.rank_columns(
            lambda step, rank=rank: 10.0 if rank == 2 else 0.0, worst_ms=10.0
        )
        for rank in range(4)
    }
    folder = tmp_path_factory.mktemp("runs") / "by-hand"
    return ddp_profiler.load_run(write(folder, report_runs.run_info(4), columns))


@pytest.fixture(scope="module")
def study():
    """A study at dp 1, 2, 4, 8 that holds every figure there is."""
    found = report_runs.study()
    predictor, why_not = predictor_of(found.summary)
    info = report_runs.run_info(8)
    return LoadedRun(
        Path("runs/study"),
        LoadedInFull(info, found.summary, found.details, (), predictor, why_not),
    )


@pytest.fixture(scope="module")
def example():
    return ddp_profiler.load_run(EXAMPLE)


def test_every_step_has_its_parts(by_hand):
    steps = by_hand.steps()
    assert len(steps) == 4 * 20
    assert (steps["step_ms"] - steps[PART_COLUMNS].sum(axis=1)).abs().max() < 1e-9
    late, others = steps[steps["rank"] == 2], steps[steps["rank"] != 2]
    expected = {"data": 5, "forward": 20, "backward": 40, "exposed_wait": 10}
    expected |= {"exposed_transfer": 15, "exposed_copy": 5, "optimizer": 10, "other": 5}
    for part in PARTS:
        assert others[f"{part}_ms"].tolist() == pytest.approx([expected.get(part, 0)] * 60), part
    assert late["forward_ms"].tolist() == pytest.approx([30] * 20)
    assert late["exposed_wait_ms"].tolist() == pytest.approx([0] * 20, abs=1e-9)
    assert set(steps["samples"]) == {8}
    assert others["comm_busy_ms"].tolist() == pytest.approx([15 + 25] * 60)
    assert others["comm_overlapped_ms"].tolist() == pytest.approx([15] * 60)
    assert steps["recorded_step"].tolist() == list(range(20)) * 4
    assert set(steps["gradient_bytes"]) == {2000}


def test_of_plain_steps_only_the_length_is_known(by_hand):
    steps = by_hand.steps(variant="plain")
    assert steps["step_ms"].tolist() == pytest.approx([110] * 80)
    assert steps[PART_COLUMNS].isna().all(axis=None)
    assert steps[["samples", "collectives", "comm_busy_ms"]].isna().all(axis=None)
    assert set(steps["variant"]) == {"plain"}
    assert by_hand.steps(variant="warmup").empty


def test_means_are_those_of_the_steps(by_hand, example):
    for run in (by_hand, example):
        steps = run.steps()
        of_level = steps.groupby("level")[PART_COLUMNS].mean()
        parts = run.parts().pivot(index="level", columns="part", values="time_ms")
        ranks = run.ranks().set_index(["level", "rank"])[PART_COLUMNS]
        of_rank = steps.groupby(["level", "rank"])[PART_COLUMNS].mean()
        levels = run.levels().set_index("level")
        for part in PARTS:
            column = f"{part}_ms"
            assert (of_level[column] - parts[part]).abs().max() < 1e-9
            assert (of_rank[column] - ranks[column]).abs().max() < 1e-9
        sums = parts.sum(axis=1) - levels["instrumented_step_mean_ms"]
        assert sums.abs().max() < 1e-9
        plain = run.steps(variant="plain").groupby("level")["step_ms"].mean()
        assert (plain - levels["step_mean_ms"]).abs().max() < 1e-9


def test_collectives(by_hand):
    found = by_hand.collectives()
    assert len(found) == 4 * 20 * 2
    of_first = found[(found["rank"] == 0) & (found["step"] == 7)]
    assert of_first["collective"].tolist() == [0, 1]
    assert of_first["begin_ms"].tolist() == pytest.approx([30, 65])
    assert of_first["hidden_until_ms"].tolist() == pytest.approx([45, 65])
    assert of_first["end_ms"].tolist() == pytest.approx([45, 90])
    assert of_first["exposed_ms"].tolist() == pytest.approx([0, 25])
    assert found["bytes"].tolist() == [1000] * 160
    # Nothing overlaps here: what is in flight in a step is the sum of its collectives.
    sums = found.groupby(["rank", "step"])[["hidden_ms", "exposed_ms"]].sum()
    steps = by_hand.steps().set_index(["rank", "step"])
    assert (sums["hidden_ms"] - steps["comm_overlapped_ms"]).abs().max() < 1e-9
    assert (sums.sum(axis=1) - steps["comm_busy_ms"]).abs().max() < 1e-9


def test_collectives_of_a_step_are_those_of_the_typical_step(by_hand, example):
    for run in (by_hand, example):
        for _, bucket in run.buckets().iterrows():
            every = run.collectives(bucket["level"])
            chosen = every[
                (every["rank"] == bucket["rank"])
                & (every["step"] == bucket["step"])
                & (every["collective"] == bucket["first_collective"])
            ]
            assert len(chosen) == 1
            for column in ("bytes", "begin_ms", "hidden_until_ms", "end_ms", "exposed_ms"):
                assert chosen.iloc[0][column] == pytest.approx(bucket[column]), column


def test_an_unnoticed_completion_is_told_apart(tmp_path):
    columns = report_runs.rank_columns(steps=20)
    last = (columns["kind"] == 7) & (columns["index"] == 1) & (columns["step"] == 3)
    columns["end_ns"][last] = frames.NULL
    both = {0: columns, 1: report_runs.rank_columns(steps=20)}
    run = ddp_profiler.load_run(write(tmp_path / "run", report_runs.run_info(2), both))
    found = run.collectives()
    unnoticed = found[~found["completion_noticed"]]
    assert unnoticed[["rank", "step", "collective"]].to_numpy().tolist() == [[0, 3, 1]]
    # Then it counts as in flight until backward ends, at 85.
    assert unnoticed["end_ms"].tolist() == pytest.approx([85])


def test_straggler_and_heat_map(by_hand):
    late = by_hand.stragglers()
    assert late[["rank", "cause"]].to_numpy().tolist() == [[2, "forward"]]
    assert late["lag_ms"].tolist() == pytest.approx([10])
    cells = by_hand.rank_heat_map()
    assert len(cells) == 4 * 20
    means = cells.groupby("first_rank")["excess_ms"].mean()
    assert means.tolist() == pytest.approx([0, 0, 10, 0])


def test_a_heat_map_of_many_steps_says_what_a_cell_holds(tmp_path):
    columns = {
        rank: report_runs.rank_columns(lambda step, rank=rank: 3.0 * rank, steps=250)
        for rank in range(2)
    }
    run = ddp_profiler.load_run(write(tmp_path / "run", report_runs.run_info(2), columns))
    cells = run.rank_heat_map()
    of_one = cells[cells["first_rank"] == 1]
    held = [s for a, b in zip(of_one["first_step"], of_one["last_step"], strict=True)
            for s in range(a, b + 1)]  # fmt: skip
    assert held == list(range(250))
    assert len(of_one) < 250


def test_tables_of_a_study(study):
    levels = study.levels().set_index("level")
    assert levels["dp"].tolist() == [1, 2, 4, 8]
    for level in study.summary.levels:
        row = levels.loc[level.id]
        assert row["efficiency"] == level.efficiency
        assert row["step_mean_ms"] == level.step_ms.mean
        assert row["bound"] == "compute"
        assert row["batch_observed"] == level.global_batch
        assert row["overhead_pct"] == 1.0
    terms = study.waterfall("dp8-acc1").set_index("term")["time_ms"]
    assert terms.drop("measured").sum() == pytest.approx(terms["measured"])
    assert terms["measured"] == levels.loc["dp8-acc1", "step_mean_ms"]
    reduced = study.allreduce("dp4-acc1")
    expected = next(lv for lv in study.summary.levels if lv.id == "dp4-acc1").allreduce
    of_sweep = reduced[reduced["kind"] == "sweep"]
    assert of_sweep["time_ms"].tolist() == [size.time_ms for size in expected.sizes]
    assert of_sweep["bucket"].isna().all()
    of_model = reduced[reduced["kind"] == "bucket"]
    assert of_model["bucket"].tolist() == list(range(len(expected.buckets)))
    assert of_model["bytes"].tolist() == [bucket.bytes for bucket in expected.buckets]
    assert set(reduced["link"]) == {expected.link.name}
    assert study.findings()["expected_gain_ms"].tolist()[0] == 9.0
    assert study.findings()["id"].tolist() == ["loss", "limit"]


def test_predictions(study):
    ahead = study.predictions()
    assert ahead["dp"].tolist() == [16, 32, 64]
    assert (ahead["step_interval90_low_ms"] < ahead["step_ms"]).all()
    assert (ahead[PART_COLUMNS].sum(axis=1) - ahead["step_ms"]).abs().max() < 1e-6
    assert study.why_no_predictions is None
    slower = study.predictions(dp=16, bandwidth_gbps=1)
    assert slower["step_ms"].item() > ahead["step_ms"].iloc[0]
    again = study.predictions(dp=[8, 16])
    assert again["measured_ms"].notna().tolist() == [True, False]
    tested = study.back_test()
    assert "dp4-acc1" in tested["held_out"].tolist()
    errors = (tested["predicted_ms"] / tested["measured_ms"] - 1) * 100
    assert (errors - tested["error_pct"]).abs().max() < 1e-9


def test_what_carries_no_prediction_says_why(by_hand):
    assert by_hand.predictions().empty
    assert by_hand.back_test().empty
    assert "run of a script" in by_hand.why_no_predictions
    with pytest.raises(InputError, match="run of a script"):
        by_hand.predictions(dp=8)


def test_errors_name_arguments(study):
    with pytest.raises(UsageError, match=r"^bucket_cap_mb=-1 is no number above 0"):
        study.predictions(dp=16, bucket_cap_mb=-1)
    with pytest.raises(UsageError, match=r"no dp"):
        study.predictions(accumulation=2)
    with pytest.raises(
        UsageError, match=r"no level 'dp3'.*\n.*dp1-acc1, dp2-acc1, dp4-acc1, dp8-acc1"
    ):
        study.parts("dp3")
    with pytest.raises(UsageError, match=r"variant 'bare'"):
        study.steps(variant="bare")
    with pytest.raises(UsageError, match=r"no figure 'pie'.*\n.*step_parts, scaling"):
        study.figure("pie")
    with pytest.raises(UsageError, match=r"shows all levels"):
        study.figure("scaling", level="dp2-acc1")
    with pytest.raises(InputError, match=r"nothing for the figure batch_split: it needs"):
        study.figure("batch_split")
    with pytest.raises(InputError, match="is not a folder"):
        ddp_profiler.load_run("no/such/folder")


def bars(axes, label=None):
    return [bar for group in axes.containers for bar in group if label in (None, group.get_label())]


def test_figures_hold_the_numbers_of_the_tables(study):
    (axes,) = study.figure("step_parts").axes
    parts = study.parts().set_index(["level", "part"])["time_ms"]
    for part in ("forward", "exposed_transfer"):
        (group,) = (g for g in axes.containers if g.get_label() == part.replace("_", " "))
        drawn = [bar.get_height() for bar in group]
        at = [round(bar.get_x() + bar.get_width() / 2) for bar in group]
        expected = [parts[study.summary.levels[place].id, part] for place in at]
        assert drawn == pytest.approx(expected)
    left, right = study.figure("scaling").axes
    levels = study.levels()
    assert [list(line.get_ydata()) for line in left.lines][1] == levels["samples_per_s"].tolist()
    assert list(right.lines[0].get_ydata()) == (levels["efficiency"] * 100).tolist()
    for level, figure in (
        ("dp8-acc1", study.figure("waterfall")),
        ("dp2-acc1", study.figure("waterfall", level="dp2-acc1")),
    ):
        terms = study.waterfall(level)["time_ms"].tolist()
        assert [b.get_height() for b in bars(figure.axes[0])] == pytest.approx(terms)
    (axes,) = study.figure("allreduce").axes
    sweep = study.allreduce("dp8-acc1").query("kind == 'sweep'")["busbw_gb_per_s"].tolist()
    assert sweep in [list(line.get_ydata()) for line in axes.lines]


def test_heat_map_figure_holds_the_cells(by_hand):
    figure = by_hand.figure("rank_heat_map")
    drawn = figure.axes[0].collections[0].get_array()
    cells = by_hand.rank_heat_map()
    expected = cells.pivot(index="first_rank", columns="first_step", values="excess_ms")
    assert drawn.shape == (4, 20)
    assert abs(drawn - expected.to_numpy()).max() < 1e-12
    assert "rank 2 does 10.0 ms more" in figure.get_suptitle()


def test_timeline_figure_holds_buckets_and_phases(by_hand):
    figure = by_hand.figure("bucket_timeline", level="script")
    drawn = {}
    for group in figure.axes[0].containers:
        for bar in group:
            times = (bar.get_x(), bar.get_x() + bar.get_width())
            drawn.setdefault(group.get_label(), []).append(times)
    buckets, phases = by_hand.buckets(), by_hand.phases()
    exposed = buckets[buckets["exposed_ms"] > 0]
    hidden = buckets[buckets["hidden_ms"] > 0]
    waits = phases[phases["part"] == "exposed_wait"]
    for label, table, begin, end in (
        ("exposed", exposed, "hidden_until_ms", "end_ms"),
        ("hidden", hidden, "begin_ms", "hidden_until_ms"),
        ("exposed_wait", waits, "begin_ms", "end_ms"),
    ):
        begins, ends = zip(*drawn[label], strict=True)
        assert begins == pytest.approx(table[begin].tolist()), label
        assert ends == pytest.approx(table[end].tolist()), label
    # The one that waits is on top, the one that is waited for is below.
    assert phases["rank"].unique().tolist()[-1] == 2


def test_figures_are_returned_and_change_nothing(example):
    before = dict(mpl.rcParams)
    drawn = example.figures()
    assert set(drawn) == set(FIGURES) - {"batch_split"}
    for name, figure in drawn.items():
        assert figure._repr_png_().startswith(b"\x89PNG"), name
        assert figure.number is None if hasattr(figure, "number") else True
    assert dict(mpl.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
    first = example.figure("step_parts")
    assert first is not example.figure("step_parts")
    assert first._repr_png_() == example.figure("step_parts")._repr_png_()


def test_tables_may_be_changed(by_hand):
    table = by_hand.levels()
    table["dp"] = 0
    assert by_hand.levels()["dp"].tolist() == [4]


def test_the_recorded_plant_is_found(example):
    """The recorded run delays rank 2 by 30 ms in data, at dp 4, every 3rd step."""
    steps = example.steps("dp4")
    delayed = (steps["rank"] == 2) & (steps["recorded_step"] % 3 == 0)
    assert delayed.sum() == 3
    assert steps.loc[delayed, "data_ms"].min() > 30
    assert steps.loc[~delayed, "data_ms"].max() < 5
    assert example.stragglers("dp4")[["rank", "cause"]].to_numpy().tolist() == [[2, "data"]]


def failed(**changes):
    return report_runs.run_info(
        2,
        status="failed",
        failures=(Failure(1, "building the model", "out of memory", "host"),),
        phases=(RankPhase(0, "host", "meeting", True), RankPhase(1, "host", "setup", None)),
        **changes,
    )


def test_a_run_that_failed_before_its_first_step(tmp_path):
    run = ddp_profiler.load_run(write(tmp_path / "run", failed(), {}))
    assert run.status == "failed"
    assert run.partial
    assert run.failures()["message"].tolist() == ["out of memory"]
    assert run.rank_states()["responds"].tolist() == [True, pd.NA]
    assert run.levels()["step_mean_ms"].isna().all()
    assert run.figures() == {}
    assert "no step was measured" in run.verdict
    check_columns(run)


def test_a_run_that_was_cut(tmp_path):
    columns = {rank: report_runs.rank_columns(steps=20) for rank in range(2)}
    folder = write(tmp_path / "run", failed(), columns)
    path = paths.rank_file(folder, 1)
    path.write_bytes(path.read_bytes()[:-8])
    run = ddp_profiler.load_run(folder)
    assert run.partial
    assert any("was cut" in note for note in run.notes)
    assert len(run.steps()) == 40
    assert set(run.figures()) == {"step_parts", "rank_heat_map", "bucket_timeline"}


def test_ranks_whose_clocks_cannot_be_compared(tmp_path):
    columns = {rank: report_runs.rank_columns(steps=20) for rank in range(2)}
    info = report_runs.run_info(2, ranks=report_runs.apart(2))
    run = ddp_profiler.load_run(write(tmp_path / "run", info, columns))
    steps = run.steps()
    assert steps["exposed_wait_ms"].isna().all()
    assert (steps["step_ms"] - steps[PART_COLUMNS].sum(axis=1)).abs().max() < 1e-9
    assert "clocks" in run.levels()["withheld"].item()
    assert run.phases()["part"].isin([*PARTS, "exposed"]).all()


def check_columns(run):
    for name, columns in TABLES.items():
        table = getattr(run, name)()
        assert list(table.columns) == [column.name for column in columns], name
        for column in columns:
            assert str(table[column.name].dtype) in (column.kind, "str"), (name, column.name)


def test_columns_are_as_declared(by_hand, study, example):
    for run in (by_hand, study, example):
        check_columns(run)


def test_every_table_and_figure_is_documented_with_its_columns():
    text = (ROOT / "docs" / "python-api.md").read_text()
    sections = dict(re.findall(r"^### `run\.(\w+)\([^\n]*\)`\n(.*?)(?=^#)", text, re.S | re.M))
    for name, columns in TABLES.items():
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", sections[name], re.M)
        assert rows == [(c.name, c.kind, c.meaning) for c in columns], name
    assert set(sections) == set(TABLES)
    for name in FIGURES:
        assert f"| `{name}` |" in text


def test_examples_of_the_page_run(monkeypatch, tmp_path):
    text = (ROOT / "docs" / "python-api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert len(blocks) == 3
    for name in ("NAME", "before", "after"):
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / name).symlink_to(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    program = "\n".join(blocks)
    # The recorded run had one node of 4 ranks: it tells nothing of the network that 8 would need.
    assert "dp=[8, 16]" in program
    names = {}
    exec(program.replace("dp=[8, 16]", "dp=[2, 4]"), names)
    assert len(names["parts"]) == len(PARTS)
    from matplotlib import pyplot

    pyplot.close("all")


def test_numbers_carry_units():
    units = ("_ms", "_bytes", "_gb_per_s", "_gbit_per_s", "_pct", "_fraction", "_per_s", "_mhz")
    bare = {"efficiency", "speedup", "mfu", "gradient_max_rel_error"}
    for columns in TABLES.values():
        for column in columns:
            if column.kind == "float64" and column.name not in bare:
                assert column.name.endswith((*units, "_mb", "_w", "_c")), column.name


def test_without_pandas_tables_name_the_remedy(by_hand, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError) as caught:
        by_hand.levels()
    assert str(caught.value) == (
        "Tables need pandas, which is not installed.\n"
        "Install it with: pip install 'ddp-profiler[notebook]'"
    )
    assert by_hand.figure("rank_heat_map") is not None


def test_a_broken_pandas_is_not_taken_for_a_missing_one(by_hand, monkeypatch, tmp_path):
    (tmp_path / "pandas.py").write_text("import what_pandas_needs")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pandas")
    with pytest.raises(ModuleNotFoundError, match="what_pandas_needs"):
        by_hand.levels()


def test_nothing_heavy_is_imported_before_it_is_needed():
    program = f"""
import sys
import ddp_profiler
heavy = lambda: [m for m in ("torch", "pandas", "matplotlib", "numpy") if m in sys.modules]
assert dir(ddp_profiler) and heavy() == [], heavy()
assert ddp_profiler.plan(1000, global_batch=10).total_optimizer_steps == 100
run = ddp_profiler.load_run({str(EXAMPLE)!r})
run.verdict, run.notes, run.report(), run.figures(), run.steps()
assert "torch" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_names():
    assert set(ddp_profiler.__all__) <= set(dir(ddp_profiler))
    for name in ddp_profiler.__all__:
        assert getattr(ddp_profiler, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'load_runs'"):
        ddp_profiler.load_runs  # noqa: B018


def test_plan_is_the_arithmetic_of_the_command(study):
    plan = ddp_profiler.plan(1000, 3, micro_batch=5, accumulation=2, dp=1, step_ms=40.0)
    assert (plan.global_batch, plan.micro_steps_per_epoch) == (10, 200)
    assert (plan.optimizer_steps_per_epoch, plan.total_optimizer_steps) == (100, 300)
    assert plan.training_time_s == pytest.approx(12.0)
    with pytest.raises(UsageError, match=r"^samples=0 is below 1"):
        ddp_profiler.plan(0)
    with pytest.raises(UsageError, match="step_ms and run both"):
        ddp_profiler.plan(1000, step_ms=1.0, run=study)
    with pytest.raises(UsageError, match=r"^step_ms=-1 is no time"):
        ddp_profiler.plan(1000, global_batch=10, step_ms=-1)
    with pytest.raises(TypeError, match="micro_batches"):
        ddp_profiler.plan(1000, micro_batches=5)
    level = study.summary.levels[2]
    measured = ddp_profiler.plan(
        4096, run=study, dp=4, micro_batch=level.micro_batch, accumulation=level.accumulation
    )
    steps = measured.total_optimizer_steps
    assert measured.training_time_s == pytest.approx(steps * level.step_ms.mean / 1e3)
    assert measured.step_time.source == "measured at dp4-acc1"


def test_columns_of_predictions_follow_the_results():
    """A field that was added and is in no table is seen here, and decided on."""
    from ddp_profiler.analysis.allreduce import AllReduceSize
    from ddp_profiler.analysis.results import Finding, Straggler
    from ddp_profiler.predict.results import BackTest

    for kind, table, left_out in (
        (AllReduceSize, "allreduce", set()),
        (Finding, "findings", set()),
        (Straggler, "stragglers", {"parts_ms"}),
        (BackTest, "back_test", {"interval90"}),
        (Failure, "failures", set()),
        (RankPhase, "rank_states", set()),
    ):
        names = {field.name for field in dataclasses.fields(kind)} - left_out
        assert names <= {column.name for column in TABLES[table]}, table


def test_variants_are_those_of_the_record():
    assert {one.upper() for one in frames.VARIANTS} <= {variant.name for variant in Variant}
