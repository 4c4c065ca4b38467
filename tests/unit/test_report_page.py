"""report.html: its numbers are the summary's, its text is escaped, it is one small file."""

import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ddp_profiler import conclusion, units
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.verdict import verdict
from ddp_profiler.cli import report as report_command
from ddp_profiler.errors import InputError
from ddp_profiler.predict.outlook import Outlook
from ddp_profiler.record.writer import SpanWriter, write_run_info
from ddp_profiler.report.page import charts
from ddp_profiler.report.page.markup import Scale, element, thinned
from ddp_profiler.report.page.render import render
from ddp_profiler.schema import Failure
from tests.unit.page_reader import Page
from tests.unit.report_runs import (
    HOSTILE,
    apart,
    hostile,
    many,
    rank_columns,
    run_info,
    script,
    study,
)

MOST_BYTES = 1_000_000


def page_of(loaded) -> Page:
    return Page(render(loaded.summary, loaded.details, loaded.outlook))


@pytest.fixture(scope="module")
def full():
    return study()


@pytest.fixture(scope="module")
def page(full):
    return page_of(full)


def test_every_section_has_what_it_is_about(page):
    sections = [
        "findings",
        "split",
        "scaling",
        "waterfall",
        "ranks",
        "timeline",
        "allreduce",
        "batch",
        "prediction",
        "noise",
        "hardware",
        "micro-batches",
        "overhead",
        "settings",
        "notes",
    ]
    assert [s for s in page.text if s] == sections
    for name in sections:
        assert page.text[name].strip()
    anchors = {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")}
    assert anchors == {f"#{name}" for name in sections}


def test_the_split_is_the_summarys(full, page):
    for level in full.summary.levels:
        column = page.column("split", 0, level.id)
        for part in PARTS:
            value = units.ms(level.breakdown_ms[part])
            # A part that no level knows has no row.
            assert column.get(part.replace("_", " "), value) == value
        assert column["instrumented step, mean"] == units.ms(level.instrumented_step_ms.mean)
        assert column["plain step, median"] == units.ms(level.step_ms.median)
        assert column["gradients reduced"] == units.nbytes(level.comm.gradient_bytes)
    assert {"forward", "backward", "exposed transfer"} <= set(column)


def test_scaling_is_the_summarys(full, page):
    for level in full.summary.levels:
        column = page.column("scaling", 0, level.id)
        assert column["samples/s"] == units.rate(level.samples_per_s)
        assert column["efficiency"] == units.percent(level.efficiency)
        assert column["speedup"] == f"{level.speedup:.2f}"


def test_waterfall_is_the_summarys(full, page):
    for level in full.summary.levels:
        column = page.column("waterfall", 0, level.id)
        assert column["bare model at dp 1"] == units.ms(level.waterfall_ms["bare"])
        assert column["measured step"] == units.ms(level.waterfall_ms["measured"])
        assert column["slower compute"] == "-0.50"
        assert column["residual"] == units.ms(level.waterfall_ms["residual"])


def test_allreduce_is_the_summarys(full, page):
    rows = page.tables["allreduce"][0][1:]
    shown = {(row[0], row[1]): row for row in rows}
    for level in full.summary.levels[1:]:
        for size in level.allreduce.sizes:
            row = shown[f"dp {level.dp}", units.nbytes(size.bytes)]
            assert row[2] == units.ms(size.time_ms)
            assert row[5] == f"{size.busbw_gb_per_s:.3g}"
    assert "ring bound, l: 0.5 GB/s" in page.text["allreduce"]


def test_batch_prediction_and_rest_are_the_summarys(full, page):
    for level in full.summary.levels:
        assert page.column("batch", 0, "observed")[level.id] == str(level.global_batch)
        assert page.column("batch", 0, "gradient error")[level.id] == "1e-06"
        assert page.column("hardware", 1, "limited by")[level.id] == "compute"
        assert page.column("overhead", 0, "cost")[level.id] == "+1.0 %"
        assert page.column("noise", 0, "noise scale, samples")[level.id] == "120"
    predictions = full.outlook.predictions
    assert [one.dp for one in predictions] == [16, 32, 64]
    rows = page.tables["prediction"][0][1:]
    assert [row[3] for row in rows] == [units.ms(one.step_ms.median) for one in predictions]
    assert [row[6] for row in rows] == [units.percent(one.efficiency) for one in predictions]
    errors = page.column("prediction", 2, "error")
    tests = full.outlook.back_tests.tests
    assert errors == {test.held_out: f"{test.error_pct:+.1f} %" for test in tests}
    assert tests


def test_prediction_interval_of_throughput_is_that_of_the_step(full):
    for one, (low, high) in zip(
        full.outlook.predictions, full.outlook.samples_per_s_interval90, strict=True
    ):
        assert low < one.samples_per_s < high
        assert low == pytest.approx(one.global_batch / one.step_ms.interval90[1] * 1e3)


def test_findings_have_their_gain(page):
    assert "expected gain 9.00 ms a step (15 %)" in page.text["findings"]
    assert page.text["findings"].count("expected gain") == 1


def test_ranks_and_step_are_those_of_the_details(full, page):
    (detail,) = full.details
    (table,) = page.tables["ranks"]
    assert table[1][:3] == ["2", "95.0", "10.0"]
    assert page.text["ranks"].count("rank ") >= 8
    rows = page.tables["timeline"][0]
    assert ["bucket 1", "1.0 kB", "65.0", "90.0"] in rows
    assert detail.timeline.step_ms == pytest.approx(110)
    assert "110 ms" in page.text["timeline"]


def test_hostile_text_is_text():
    loaded = hostile()
    html = render(loaded.summary, loaded.details, loaded.outlook)
    page = Page(html)
    assert not page.tags & {"script", "img", "iframe", "object", "base"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "alert(1)" in page.text["settings"]
    assert "\\x00" in page.text["settings"]
    for character in ("\x00", "\x1b", "\u202e", "\ud800"):
        assert character not in html
    assert html.encode("utf-8")
    # Neither style sheet nor figure ends early.
    assert html.count("</style>") == 1
    for section in ("findings", "split", "batch", "settings", "notes", "hardware", "allreduce"):
        assert "<script>alert(1)</script>" in page.text[section], section


def test_it_needs_nothing_else(full):
    html = render(full.summary, full.details, full.outlook)
    page = Page(html)
    assert "script" not in page.tags
    links = [v for _, name, v in page.attributes if name in ("href", "src")]
    assert all(v.startswith("#") or v == "data:," for v in links)
    assert set(re.findall(r"url\(([^)]{0,3})", html)) == {"#f-"}
    assert "@import" not in html
    assert "http:" not in html
    assert "https:" not in html
    policy = [v for _, name, v in page.attributes if name == "content" and "default-src" in v]
    assert policy[0].startswith("default-src 'none'")


def test_patterns_that_are_used_are_there(page):
    html = render(*_parts(study()))
    ids = {value for _, name, value in Page(html).attributes if name == "id"}
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= ids


def _parts(loaded):
    return loaded.summary, loaded.details, loaded.outlook


def test_every_class_that_is_drawn_has_a_style():
    html = render(*_parts(study(late={1: 4.0})))
    style = html[html.index("<style>") : html.index("</style>")]
    used = {
        name
        for tag, key, value in Page(html).attributes
        if key == "class" and tag in ("rect", "path", "line", "g")
        for name in value.split()
    }
    missing = {name for name in used if not re.search(rf"\.{name}\b", style)}
    # Marks only: hatches that are all of one kind, and dots.
    assert {name for name in missing if not name.startswith("k-")} <= {"dot"}


def test_size_is_bounded(full):
    assert len(render(*_parts(full))) < MOST_BYTES / 4
    rng = np.random.default_rng(1)
    work = 50 + rng.gamma(1.0, 15.0, (1024, 1000))
    loaded = many(work)
    html = render(*_parts(loaded))
    assert len(html) < MOST_BYTES / 2
    text = Page(html).text["ranks"]
    assert "A column is the mean over up to 9 steps" in text
    assert "A row is the slowest of up to 32 ranks" in text
    assert "The table has the 8 ranks" in text


def test_a_straggler_is_dark_and_marked():
    html = render(*_parts(script(8, 5, 30.0, steps=50)))
    assert "▸ rank 5" in html
    # 30 of 130 ms: the fourth shade, over all columns of the sixth row, and no other.
    assert '<path d="M0 5h50v1h-50z" class="h4">' in html
    assert not re.search(r'<path d="[^"]+" class="h[1235]">', html)


def test_run_of_a_script_says_what_does_not_apply():
    page = page_of(script())
    assert "ddp-profiler study" in page.text["scaling"]
    assert "without DDP" in page.text["waterfall"]
    assert "in isolation" in page.text["allreduce"]
    assert "run of a script" in page.text["prediction"]
    assert "The device was not measured" in page.text["hardware"]
    for empty in ("scaling", "waterfall", "allreduce", "prediction", "hardware"):
        assert not page.tables[empty]
    assert page.tables["ranks"]
    assert page.tables["timeline"]
    assert page.column("split", 0, "script")["exposed wait"] == "7.50"


def test_one_rank():
    page = page_of(script(1, None))
    assert "nobody to be compared with" in page.text["ranks"]
    assert "reduces with nobody" in page.text["timeline"]
    assert "one rank" in page.text["scaling"] or "several" in page.text["scaling"]
    assert page.text[""].count("On one rank a step takes 100 ms") == 1


def test_waiting_that_is_withheld_is_said_and_not_shown_as_0():
    page = page_of(script(3, ranks=apart(3)))
    assert "exposed wait" not in page.column("split", 0, "script")
    assert "Waiting is withheld at script" in page.text["split"]
    assert "not told apart" in page.text["timeline"]
    assert "or waiting" in page.text[""] or "compute" in page.text[""]


def test_nothing_measured():
    loaded = script()
    summary = replace(
        loaded.summary,
        levels=(),
        findings=(),
        run=replace(loaded.summary.run, partial=True, status="failed", environment={}),
    )
    page = Page(render(summary, (), Outlook((), (), None, "nothing was measured")))
    assert "The record is partial: no step was measured" in page.text[""]
    assert "None." in page.text["findings"]
    assert "No instrumented step" in page.text["split"]


def test_a_run_that_failed_says_why_before_its_figures():
    failure = Failure(1, "training", "RuntimeError: no more memory", "host")
    loaded = script(status="failed", failures=(failure,))
    told = "Rank 1 failed in training: RuntimeError: no more memory"
    assert loaded.summary.run.partial_reason == told
    assert told in page_of(loaded).text[""]
    assert script().summary.run.partial_reason is None
    long = page_of(script(status="failed", failures=(replace(failure, message="x" * 4000),)))
    assert "x" * 400 not in long.text[""]
    assert "x" * 4000 in long.text["notes"]


def test_allreduces_faster_than_their_bound_are_not_passed_over():
    loaded = study((1, 2))
    assert "faster than the ring bound" not in page_of(loaded).text["allreduce"]
    levels = list(loaded.summary.levels)
    measured = levels[-1].allreduce
    first = replace(measured.sizes[0], ring_bound_ms=2 * measured.sizes[0].time_ms)
    levels[-1] = replace(
        levels[-1], allreduce=replace(measured, sizes=(first, *measured.sizes[1:]))
    )
    beaten = replace(loaded, summary=replace(loaded.summary, levels=tuple(levels)))
    assert (
        "dp 2: some AllReduces were faster than the ring bound" in page_of(beaten).text["allreduce"]
    )


def test_verdict():
    assert verdict(study((1, 2)).summary).startswith("2 ranks do the work of 1.")
    found = verdict(script().summary)
    assert found.startswith("On 4 ranks a step takes 110 ms, of which most is compute (")
    assert found.endswith("rank 2 comes 10.0 ms late in 100 % of the steps.")
    error = replace(study((1, 2)).summary.findings[0], severity="error", message="Batch is wrong.")
    wrong = replace(study((1, 2)).summary, findings=(error,))
    assert verdict(wrong) == "Mend this before you trust its speed: Batch is wrong."


def test_parts_of_a_bar_fill_its_length(full):
    """The longest level's bar is as long as the chart; of its parts each has its share."""
    level = max(full.summary.levels, key=lambda lv: lv.instrumented_step_ms.mean)
    chart = charts.step_split([level])
    lengths = dict(re.findall(r'width="([\d.]+)%" class="p-(\w+)"', str(chart.body)))
    total = sum(float(length) for length in lengths)
    assert total == pytest.approx(100, abs=0.5)
    shares = {part: float(length) for length, part in lengths.items()}
    step = level.instrumented_step_ms.mean
    assert shares["forward"] == pytest.approx(level.breakdown_ms["forward"] / step * 100, abs=0.02)


def test_waterfall_bars_begin_where_the_last_one_ended(full):
    terms = full.summary.levels[-1].waterfall_ms
    body = str(charts.waterfall({**terms, "exposed_wait": None}, charts_names(terms)).body)
    assert "not known" in body
    ends = [float(x) for x in re.findall(r'<line x1="(-?[\d.]+)%"', body)]
    bars = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" class="w-(\w+)"', body)
    more = [(float(x), float(w)) for x, w, style in bars if style == "more" and float(w) > 0.2]
    for begin, width in more:
        assert any(abs(begin - end) < 0.02 for end in ends)
        assert any(abs(begin + width - end) < 0.02 for end in ends)


def charts_names(terms):
    return {name: name for name in terms}


def test_elements_are_escaped():
    assert element("p", HOSTILE, class_=HOSTILE).count("<") == 2
    assert '"' not in str(element("p", '"')).replace("<p>", "")


def test_scales():
    scale = Scale(1, 100, 0, 50, log=True)
    assert scale(10) == pytest.approx(25)
    assert Scale(0, 4, 100, 0)(1) == 75
    assert Scale(3, 3, 0, 100)(3) == 50
    assert len(Scale(0, 123.4, 0, 1).ticks()) <= 8
    assert len(Scale(1e-6, 1e9, 0, 1, log=True).ticks()) <= 8
    assert thinned(list(range(20)), 4)[-1] == 19
    assert len(thinned(list(range(20)), 4)) <= 5
    assert thinned([1.0]) == [1.0]


@pytest.fixture
def folder(tmp_path):
    """A run folder of two ranks."""
    info = run_info(2)
    write_run_info(tmp_path, info)
    for rank in range(2):
        writer = SpanWriter(tmp_path, rank, info.run_id)
        writer.write_columns(rank_columns())
        writer.close()
    return tmp_path


def test_command_writes_the_page_and_names_it_last(folder, capsys):
    done = CliRunner().invoke(report_command.command, [str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    names = done.output.splitlines()
    assert names[-1] == str(folder / "report.html")
    assert all((folder / name).is_file() for name in names)
    assert Page((folder / "report.html").read_text()).tables["split"]
    assert not list(folder.glob(".report*"))
    # It is made anew as often as asked for.
    before = (folder / "report.html").read_text()
    CliRunner().invoke(report_command.command, [str(folder)], catch_exceptions=False)
    assert (folder / "report.html").read_text() == before


def test_study_ends_with_its_report(folder):
    summary, text = conclusion.conclude(folder, color=False)
    assert text.rstrip().splitlines()[-1] == f"Report: {folder / 'report.html'}"
    html = (folder / "report.html").read_text()
    assert Page(html).column("split", 0, "script")["forward"] == units.ms(
        summary.levels[0].breakdown_ms["forward"]
    )


def test_folder_without_a_run(tmp_path):
    with pytest.raises(InputError):
        CliRunner().invoke(report_command.command, [str(tmp_path)], catch_exceptions=False)


def test_part_of_a_record_that_was_cut(folder):
    path = folder / "rank-00001.arrows"
    path.write_bytes(path.read_bytes()[:-8])
    CliRunner().invoke(report_command.command, [str(folder)], catch_exceptions=False)
    assert "The record is partial" in Page((folder / "report.html").read_text()).text[""]
