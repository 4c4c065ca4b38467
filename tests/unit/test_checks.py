"""Each thing that cannot be in a record is refused, one at a time, and a sound one is not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_profiler.errors import InputError
from ddp_profiler.record import checks, reader, writer
from ddp_profiler.schema import (
    CONDENSED_COLUMNS,
    SPAN_COLUMNS,
    ClockReading,
    Failure,
    LevelFacts,
    LevelSettings,
    RankPhase,
    RankPlace,
    RecordPart,
    RunInfo,
    SpanKind,
)

PATH = Path("run.json")
LEVEL = LevelSettings("dp2", 2, 8, 1, "packed", (0, 1))
FACT = LevelFacts("dp2", 10, 40, 1, (40,), {}, ())
PLACES = tuple(RankPlace(rank, rank, 0, "host", "boot", "cpu", 17) for rank in (0, 1))
CLOCK = ClockReading(rank=1, at_ns=5, low_ns=-3, high_ns=3, real_offset_ns=0)
SOUND = RunInfo(
    schema_version=1,
    run_id="run-1",
    status="complete",
    created="2026-01-01T12:00:00+00:00",
    profiler_version="0.1.0",
    world_size=2,
    settings={"model": "mlp", "bucket_cap_mb": 25.0},
    levels=(LEVEL,),
    ranks=PLACES,
    facts=(FACT,),
    clocks=(CLOCK,),
)


def level(**changes):
    return {"levels": (replace(LEVEL, **changes),)}


def fact(**changes):
    return {"facts": (replace(FACT, **changes),)}


def clock(**changes):
    return {"clocks": (replace(CLOCK, **changes),)}


def setting(name, value):
    return {"settings": {**SOUND.settings, name: value}}


def test_a_sound_description_is_accepted():
    checks.check_run_info(PATH, SOUND)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": (1 << 20) + 1}, "world_size is 1048577"),
        (setting("bucket_cap_mb", 0), "bucket_cap_mb is no number above 0"),
        (setting("link_gbps", "10"), "link_gbps is no number above 0"),
        (setting("tokens_per_sample", True), "tokens_per_sample is no number above 0"),
        ({"levels": (LEVEL,) * ((1 << 15) + 1)}, "it has 32769 levels"),
        ({"levels": (LEVEL, LEVEL)}, "two levels have the same id"),
        (level(dp=3), "dp 3 and 2 ranks of 2"),
        (level(dp=0, ranks=()), "dp 0 and 0 ranks of 2"),
        (level(ranks=(0, 0)), "ranks that are none, or one of them twice"),
        (level(ranks=(0, 2)), "ranks that are none, or one of them twice"),
        (level(micro_batch=-1), "micro-batch -1 x 1"),
        (level(accumulation=0), "micro-batch 8 x 0"),
        (level(accumulation=1 << 14), "micro-batch 8 x 16384"),
        ({"ranks": (PLACES[0], PLACES[0])}, "a rank is described twice"),
        ({"ranks": (replace(PLACES[0], node=2),)}, "a node's number"),
        ({"ranks": (replace(PLACES[0], node=-1),)}, "a node's number"),
        ({"ranks": (replace(PLACES[0], rank=2),)}, "it names rank 2 of 2"),
        ({"keeper": 2}, "it names rank 2 of 2"),
        ({"failures": (Failure(-1, "x", "x"),)}, "it names rank -1 of 2"),
        ({"phases": (RankPhase(7, "host", "x", True),)}, "it names rank 7 of 2"),
        ({"parts": (RecordPart(2, "host", "/f", (0,)),)}, "it names rank 2 of 2"),
        ({"parts": (RecordPart(0, "host", "/f", (9,)),)}, "it names rank 9 of 2"),
        (clock(rank=2), "it names rank 2 of 2"),
        (clock(at_ns=1 << 62), "impossible times"),
        (clock(real_offset_ns=-(1 << 62)), "impossible times"),
        (clock(low_ns=4), "impossible times"),
        ({"facts": (FACT, FACT)}, "describes a level twice"),
        (fact(parameters=-1), "negative or beyond"),
        (fact(bucket_bytes=(40, -40)), "negative or beyond"),
        (fact(gradient_bytes=1 << 62), "negative or beyond"),
        (fact(reduced_outside_bytes=-1), "negative or beyond"),
    ],
)
def test_a_description_of_what_cannot_have_run_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        checks.check_run_info(PATH, replace(SOUND, **changes))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "the number nan"),
        (-1e31, "the number -1e"),
        (1 << 64, "a number of 20 digits"),
        (-(1 << 64), "a number of 20 digits"),
    ],
)
def test_numbers_that_nothing_can_hold_are_refused(value, words):
    checks.check_numbers(PATH, {"a": [1e30, (1 << 64) - 1, None, True, "x"]})
    with pytest.raises(InputError, match=words):
        checks.check_numbers(PATH, {"a": [1, {"b": value}]})


def test_a_run_is_checked_where_it_is_read(tmp_path):
    writer.write_run_info(tmp_path, SOUND)
    assert reader.read_run_info(tmp_path) == SOUND
    path = tmp_path / "run.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "keeper": 2}))
    with pytest.raises(InputError, match="it names rank 2 of 2"):
        reader.read_run_info(tmp_path)
    path.write_text(json.dumps({**value, "settings": {"steps": 1e31}}))
    with pytest.raises(InputError, match="holds the number 1e"):
        reader.read_run_info(tmp_path)


def test_json_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "run.json"
    with path.open("wb") as file:
        file.truncate(checks.MAX_JSON_BYTES + 1)
    with pytest.raises(InputError, match="no more than 268,435,456 are read"):
        checks.read_json_bytes(path)


def test_a_device_is_not_read(tmp_path):
    path = tmp_path / "run.json"
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="no ordinary file"):
        checks.read_json_bytes(path)


# -- spans ---------------------------------------------------------------------------------------


def columns(condensed=False):
    """A step with a forward, and a gradient's collective."""
    names = [name for name, _ in (*SPAN_COLUMNS, *(CONDENSED_COLUMNS if condensed else ()))]
    made = {name: np.zeros(3, dtype=np.int64) for name in names}
    made["kind"][:] = [SpanKind.STEP, SpanKind.FORWARD, SpanKind.GRADIENT]
    made["begin_ns"][:] = [1001, 1003, 1007]
    made["end_ns"][:] = [2001, 1505, 1907]
    return made


@pytest.mark.parametrize("condensed", [False, True])
def test_sound_spans_are_accepted(condensed):
    checks.check_columns(PATH, columns(condensed), writer.NULL)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("begin_ns", -(1 << 61), "30 years"),
        ("begin_ns", np.iinfo(np.int64).min, "30 years"),
        ("end_ns", 1 << 61, "30 years"),
        ("end_ns", 1000, "ends before it begins"),
        ("level", -1, "has a negative level"),
        ("repetition", -1, "has a negative repetition"),
        ("block", -1, "has a negative block"),
        ("step", -1, "has a negative step"),
        ("micro_step", -2, "impossible micro_step"),
        ("micro_step", (1 << 14) - 1, "impossible micro_step"),
        ("bytes", -1, "impossible bytes"),
        ("samples", -1, "impossible samples"),
        ("samples", (1 << 62) + 1, "impossible samples"),
        ("collectives", -1, "impossible collectives"),
        ("busy_ns", -1, "impossible busy_ns"),
        ("overlapped_ns", 1 << 61, "impossible overlapped_ns"),
        ("unnoticed", -1, "impossible unnoticed"),
    ],
)
def test_spans_that_nothing_could_have_recorded_are_refused(name, value, words):
    spans = columns(condensed=True)
    spans[name][1] = value
    with pytest.raises(InputError, match=f"span 1 .*{words}"):
        checks.check_columns(PATH, spans, writer.NULL)
