"""The table: what it shows, that it fits 80 columns, and what it keeps from the terminal."""

import unicodedata
from dataclasses import replace

import pytest

from ddp_profiler.analysis.data_sheets import find_sheet
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import (
    BatchCheck,
    Communication,
    Distribution,
    Finding,
    LevelResult,
    Overhead,
    RunResult,
    Summary,
)
from ddp_profiler.analysis.roofline import Bound, Hardware, Roofline
from ddp_profiler.report import console
from ddp_profiler.report.text import for_encoding

BREAKDOWN = dict(zip(PARTS, (1.5, 20.25, 0.5, 40.0, 0.0, 3.0, 5.0, 2.0, 7.0, 0.75), strict=True))


def make_level(**changes) -> LevelResult:
    values = {
        "id": "dp2",
        "dp": 2,
        "nodes": 1,
        "placement": "packed",
        "micro_batch": 8,
        "accumulation": 1,
        "global_batch": 16,
        "steps": 20,
        "repetitions": 1,
        "warmup_steps": 5,
        "warmup_ms": 500.0,
        "step_ms": Distribution(79.0, 78.5, 77.0, 81.0, (77.7, 79.3)),
        "instrumented_step_ms": Distribution(80.0, 79.5, 78.0, 82.0, (78.7, 80.3)),
        "samples_per_s": 203.8,
        "tokens_per_s": None,
        "mfu": None,
        "breakdown_ms": BREAKDOWN,
        "comm": Communication(18.0, 10.8, 0.6, 25_000_000, 4, 4.0, 0, {}),
        "batch_check": BatchCheck(None, 16, 16, True, None, None, None, None, None, None, None, ()),
        "overhead": Overhead(78.5, 79.5, 1.3, (-0.2, 2.4)),
        "allreduce": None,
        "gradient_ready": (),
        "costs_ms": None,
        "contention_ms": None,
        "wrapper_ms": None,
        "reference": None,
        "speedup": None,
        "efficiency": None,
        "pop": None,
        "waterfall_ms": None,
        "clock_uncertainty_ms": 0.0,
        "straggler": None,
        "stragglers": (),
        "ranks": (),
        "notes": (),
        **changes,
    }
    return LevelResult(**values)


def make_summary(*levels, **changes) -> Summary:
    run = RunResult(
        run_id="run-1",
        status="complete",
        created="2026-01-01T12:00:00+00:00",
        profiler_version="0.1.0",
        world_size=2,
        nodes=1,
        partial=False,
        settings={"model": "gpt-tiny", "precision": "fp32"},
        environment={"0": {"backend": "gloo", "device_type": "cpu", "threads_per_rank": 1}},
        statistics_unit="steps",
    )
    run = replace(run, **changes.pop("run", {}))
    return Summary(1, run, levels, changes.pop("findings", ()), changes.pop("notes", ()))


def empty_level(**changes) -> LevelResult:
    return make_level(
        step_ms=None,
        instrumented_step_ms=None,
        samples_per_s=None,
        breakdown_ms=dict.fromkeys(PARTS),
        comm=Communication(None, None, None, None, None, None, 0, {}),
        batch_check=BatchCheck(None, 16, None, None, None, None, None, None, None, None, None, ()),
        overhead=None,
        **changes,
    )


def cells(text: str, label: str) -> list[str]:
    """The rest of the first line that begins with a label."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return line.strip().removeprefix(label).split()


def width(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def test_figures():
    text = console.render(make_summary(make_level()))
    assert text.splitlines()[0] == "gpt-tiny on 2 ranks, gloo, cpu, fp32, 1 thread a rank"
    expected = {
        "ms a step": ["dp2"],
        "global batch (samples)": ["16", "ok"],
        "plain step (median)": ["78.5"],
        "95 % interval": ["77.7..79.3"],
        "samples/s": ["203.8"],
        "instrumented step (mean)": ["80.0"],
        "data": ["1.50", "2%"],
        "forward comm": ["0.50", "1%"],
        "backward": ["40.0", "50%"],
        "exposed wait": ["3.00", "4%"],
        "exposed transfer": ["5.00", "6%"],
        "exposed copy": ["2.00", "2%"],
        "optimizer": ["7.00", "9%"],
        "other": ["0.75", "1%"],
        "comm in flight": ["18.0"],
        "hidden by backward": ["60", "%"],
        "collectives / buckets": ["4", "/", "4"],
        "gradients reduced": ["25.0", "MB"],
        "cost of measuring": ["+1.3", "%"],
    }
    assert {label: cells(text, label) for label in expected} == expected
    assert "tokens/s" not in text


def test_all_parts_are_shown_in_order():
    text = console.render(make_summary(make_level()))
    places = [text.index(f"\n  {part.replace('_', ' ')} ") for part in PARTS]
    assert places == sorted(places)


def test_tokens_where_there_are_any():
    text = console.render(make_summary(make_level(tokens_per_s=13043.0), make_level()))
    assert cells(text, "tokens/s") == ["13043", "-"]


def test_what_does_not_apply_is_a_dash():
    text = console.render(make_summary(empty_level()))
    assert "None" not in text
    assert "nan" not in text.lower()
    for label in (
        "plain step (median)",
        "95 % interval",
        "samples/s",
        "instrumented step (mean)",
        *(part.replace("_", " ") for part in PARTS),
        "comm in flight",
        "hidden by backward",
        "collectives / buckets",
        "gradients reduced",
        "cost of measuring",
    ):
        assert cells(text, label) == ["-"], label
    assert cells(text, "global batch (samples)") == ["16", "?"]


def test_batch_that_is_not_as_configured():
    check = BatchCheck(
        None, 16, 15, False, None, None, None, None, None, None, None, ("Observed 15 samples.",)
    )
    text = console.render(make_summary(make_level(batch_check=check)))
    assert cells(text, "global batch (samples)") == ["16", "SAW", "15"]
    assert "note: Observed 15 samples." in text


def test_the_batch_that_was_expected_stands_beside_the_one_that_was_seen():
    check = BatchCheck(9, 8, 8, False, None, None, None, None, None, None, None, ())
    text = console.render(make_summary(make_level(global_batch=8, batch_check=check)))
    assert cells(text, "global batch (samples)") == ["9", "SAW", "8"]


def test_a_batch_that_is_not_known_is_no_number():
    check = BatchCheck(None, None, None, None, None, None, None, None, None, None, None, ())
    level = make_level(
        micro_batch=None, global_batch=None, samples_per_s=None, accumulation=1, batch_check=check
    )
    text = console.render(make_summary(level))
    assert cells(text, "micro-batch x acc. x dp") == ["?", "x", "1", "x", str(level.dp)]
    assert cells(text, "global batch (samples)") == ["?"]
    assert cells(text, "samples/s") == ["-"]


def test_notes_and_findings():
    level = make_level(notes=("a note",), comm=Communication(1.0, 0.5, 0.5, 10, 4, 4.0, 3, {}))
    finding = Finding("slow", "warning", "Rank 3 is slow.", "30 ms later")
    text = console.render(make_summary(level, findings=(finding,), notes=("of the run",)))
    # Long lines are broken between words.
    flat = " ".join(text.split())
    assert "note: a note" in flat
    assert "dp2: 3 collectives were never seen to complete" in flat
    assert "note: of the run" in flat
    assert "warning: Rank 3 is slow. (30 ms later)" in flat


def test_partial_run_is_marked():
    text = console.render(make_summary(make_level(), run={"partial": True}))
    assert "PARTIAL: a part of the record is missing" in " ".join(text.split())
    text = console.render(make_summary(make_level(), run={"partial": True, "status": "failed"}))
    assert "PARTIAL: the run did not end as it should" in " ".join(text.split())
    assert "PARTIAL" not in console.render(make_summary(make_level()))


def test_many_levels_are_split_into_tables():
    levels = [make_level(id=f"dp{n}", dp=n) for n in (1, 2, 4, 8, 16, 32)]
    text = console.render(make_summary(*levels))
    heads = [line.split()[3:] for line in text.splitlines() if line.startswith("ms a step")]
    assert [name for names in heads for name in names] == [level.id for level in levels]
    assert len(heads) > 1
    assert max(map(width, text.splitlines())) <= 80


def test_no_levels():
    assert "gpt-tiny" in console.render(make_summary())


def realistic(dp: int) -> LevelResult:
    """Figures of a large, noisy run: as wide as they get in practice."""
    check = BatchCheck(
        None, 16 * 4 * dp, 16 * 4 * dp, True, None, None, None, None, None, None, None, ()
    )
    return make_level(
        id=f"dp{dp}-acc16",
        dp=dp,
        micro_batch=16,
        accumulation=4,
        global_batch=16 * 4 * dp,
        step_ms=Distribution(1234.5, 1234.5, 1234.5, 1234.5, (1111.1, 1333.3)),
        instrumented_step_ms=Distribution(1300.0, 1300.0, 1300.0, 1300.0, None),
        samples_per_s=123456.7,
        breakdown_ms=dict.fromkeys(PARTS, 130.0),
        batch_check=check,
        overhead=Overhead(1234.5, 1300.0, -14.9, (-21.2, 25.4)),
    )


def test_wide_figures_fit():
    text = console.render(
        make_summary(
            *(realistic(dp) for dp in (1, 2, 4, 8)),
        )
    )
    assert max(map(width, text.splitlines())) <= 80


def test_no_figure_is_cut():
    text = console.render(make_summary(*(realistic(dp) for dp in (1, 2, 4, 8))))
    assert "…" not in text
    assert text.count("-21.2..+25.4") == 4
    for dp in (1, 2, 4, 8):
        assert f"16 x 4 x {dp}" in text
        assert f"{64 * dp} ok" in text


def extreme(level_id: str = "dp128-mb16-acc128", **changes) -> LevelResult:
    values = {
        "id": level_id,
        "dp": 128,
        "micro_batch": 16,
        "accumulation": 128,
        "global_batch": 262144,
        "step_ms": Distribution(123456.7, 123456.7, 1.0, 2.0, (111111.1, 222222.2)),
        "instrumented_step_ms": Distribution(123456.7, 123456.7, 1.0, 2.0, None),
        "samples_per_s": 12345678.9,
        "tokens_per_s": 12345678901.2,
        "mfu": 1.0,
        "breakdown_ms": dict.fromkeys(PARTS, 123456.7),
        "batch_check": replace(
            BatchCheck(None, 262144, 262143, False, None, None, None, None, None, None, None, ()),
            ranks_agree=False,
        ),
        "overhead": Overhead(1.0, 2.0, -100.0, (-100.0, 250.0)),
        "speedup": 128.0,
        "efficiency": 1.0,
        **changes,
    }
    return make_level(**values)


EXTREME_CELLS = (
    "16 x 128 x 128",
    "262144 SAW 262143",
    "RANKS DIFFER",
    "111111..222222",
    "128.00x 100.0 %",
    "123457  100%",
    "-100.0..+250.0",
)


@pytest.mark.parametrize("count", range(1, 9))
def test_extreme_figures_are_never_cut(count):
    text = console.render(make_summary(*(extreme() for _ in range(count))))
    assert max(map(width, text.splitlines())) <= 80
    assert "…" not in text
    for cell in EXTREME_CELLS:
        assert text.count(cell) == count * (len(PARTS) if cell.endswith("00%") else 1), cell
    assert text.count("dp128-mb16-acc128") == count
    assert text.count("instrumented step (mean)") == len(heads(text))


def heads(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("ms a step")]


def test_small_figures_beside_large_ones():
    levels = [extreme(), make_level(), make_level(id="dp1"), make_level(id="dp4"), extreme()]
    text = console.render(make_summary(*levels))
    assert max(map(width, text.splitlines())) <= 80
    assert "…" not in text
    assert all(text.count(cell) >= 2 for cell in EXTREME_CELLS)


def test_only_the_header_is_broken():
    levels = [make_level(id=f"dp{n}-mb16-acc128") for n in (16, 32, 64, 128)]
    text = console.render(make_summary(*levels))
    assert max(map(width, text.splitlines())) <= 80
    assert len(heads(text)) == 1
    assert text.count("77.7..79.3") == 4
    lines = text.splitlines()
    last = lines.index(heads(text)[0])
    assert lines[last - 1].split() == ["dp16-mb16-", "dp32-mb16-", "dp64-mb16-", "dp128-mb16-"]
    assert lines[last].split()[3:] == ["acc128"] * 4


@pytest.mark.parametrize("name", ["x" * 300, "-" * 90, "漢" * 60, "a-" + "b" * 100])
def test_header_of_any_length(name):
    text = console.render(make_summary(make_level(id=name), make_level(), make_level(id=name)))
    assert max(map(width, text.splitlines())) <= 80
    assert "…" not in text
    assert text.count(name[-1]) >= 2 * name.count(name[-1])
    assert text.count("77.7..79.3") == 3


def test_figure_wider_than_the_screen_is_broken_not_cut():
    text = console.render(make_summary(make_level(samples_per_s=1e90)))
    assert max(map(width, text.splitlines())) <= 80
    assert "…" not in text
    digits = f"{1e90:.0f}"
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("samples/s"))
    assert cells(text, "samples/s")[0] + lines[place + 1].strip() == digits


def test_for_encoding():
    text = console.render(make_summary(make_level(), notes=("größer ± 漢",)))
    assert for_encoding(text, "utf-8") == text
    assert for_encoding(text, None) == text
    for encoding in ("ascii", "ANSI_X3.4-1968", "no-such-encoding"):
        plain = for_encoding(text, encoding)
        assert plain.isascii()
        assert text.translate({ord("─"): "-"}).splitlines()[:-1] == plain.splitlines()[:-1]
        assert plain.endswith("note: gr\\xf6\\xdfer \\xb1 \\u6f22\n")
    latin = for_encoding(text, "latin-1")
    assert "größer ± \\u6f22" in latin
    assert "--------" in latin
    assert for_encoding("a\udc80", "utf-8") == "a\\udc80"


def test_colour_only_where_asked_for():
    summary = make_summary(make_level(), empty_level(id="dp4"))
    plain, colored = console.render(summary), console.render(summary, color=True)
    assert "\x1b" not in plain
    assert "\x1b[" in colored


HOSTILE = "a\x1b[2J\x1b]0;owned\x07\rb\x9b31m\x08"


@pytest.mark.parametrize(
    "summary",
    [
        make_summary(make_level(), run={"settings": {"model": HOSTILE, "precision": "fp32"}}),
        make_summary(make_level(), run={"environment": {"0": {"backend": HOSTILE}}}),
        make_summary(make_level(id=HOSTILE)),
        make_summary(make_level(notes=(HOSTILE,))),
        make_summary(make_level(), notes=(HOSTILE,)),
        make_summary(make_level(), findings=(Finding("x", "info", HOSTILE, HOSTILE),)),
    ],
    ids=["model", "backend", "level", "level note", "note", "finding"],
)
def test_control_characters_do_not_reach_the_terminal(summary):
    text = console.render(summary)
    assert not [c for c in text if unicodedata.category(c) == "Cc" and c != "\n"]


def test_markup_is_text():
    text = console.render(
        make_summary(make_level(id="[red]x[/]", notes=("[bold]y[/bold] :smile:",)))
    )
    assert cells(text, "ms a step") == ["[red]x[/]"]
    assert "[bold]y[/bold] :smile:" in text


HARDWARE = Hardware(0, "NVIDIA H200", "tf32", 4.1e14, 4.2e12, 97.6, 4.2, None, None)


def test_hardware_and_roofline():
    levels = (
        make_level(id="a", roofline=Roofline(Bound.COMPUTE, "why", 0.1, 0.2, roof_fraction=0.74)),
        make_level(id="b", roofline=Roofline(Bound.INPUT, "", 0.61, 0.2, roof_fraction=0.74)),
        make_level(id="c", roofline=Roofline(Bound.COMMUNICATION, "", 0.1, 0.55)),
        make_level(
            id="d",
            roofline=Roofline(
                Bound.NONE, "", 0.1, 0.2, roof_fraction=0.23, data_sheet_flops_fraction=0.125
            ),
        ),
        make_level(id="e", roofline=Roofline(None, "")),
    )
    text = console.render(make_summary(*levels[:3]))
    assert cells(text, "roofline") == ["compute", "74", "%", "input", "61", "%", "comm.", "55", "%"]
    assert "data sheet" not in text
    assert "a roofline: why." in text
    text = console.render(make_summary(*levels[3:], run={"hardware": HARDWARE}))
    assert cells(text, "roofline") == ["neither", "23", "%", "-"]
    assert "roofline" not in console.render(make_summary(make_level()))
    assert max(map(width, text.splitlines())) <= 80


def test_data_sheets_are_shown_or_the_reason_is():
    sheet = find_sheet("NVIDIA H200")
    with_sheet = replace(HARDWARE, data_sheet=sheet.sheet, data_sheet_reason=sheet.reason)
    level = make_level(
        mfu=0.3, roofline=Roofline(Bound.NONE, "", 0.1, 0.2, data_sheet_flops_fraction=0.125)
    )
    text = console.render(make_summary(level, run={"hardware": with_sheet}))
    assert cells(text, "of the data sheet's") == ["12.5", "%"]
    words = " ".join(text.split())
    assert (
        "NVIDIA H200 reaches 410 TFLOP/s in products (tf32) and 4.2 TB/s in copies (measured on "
        "rank 0); ridge at 97.6 FLOP/byte. data sheet of H200 SXM: 494 TFLOP/s, 4.8 TB/s; the "
        "device's power limit is not known."
    ) in words
    unknown = replace(HARDWARE, data_sheet_reason="no row for this name")
    text = console.render(make_summary(level, run={"hardware": unknown}))
    assert "no data sheet for this device: no row for this name." in " ".join(text.split())
