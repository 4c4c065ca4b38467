"""The run folder: written and read back, cut at every byte, and refused where it is no run."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.load import load_summary
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.schema import (
    NULLABLE_SPAN_COLUMNS,
    SCHEMA_VERSION,
    SPAN_COLUMNS,
    Failure,
    GpuUse,
    LevelFacts,
    LevelSettings,
    MachineUse,
    RankPlace,
    RunInfo,
)

NAMES = [name for name, _ in SPAN_COLUMNS]


def run_info(**changes) -> RunInfo:
    values = {
        "schema_version": SCHEMA_VERSION,
        "run_id": "run-1",
        "status": "complete",
        "created": "2026-01-01T12:00:00+00:00",
        "profiler_version": "0.1.0",
        "world_size": 1,
        "settings": {"model": "mlp", "steps": 2, "data": None},
        "levels": (LevelSettings("dp1", 1, 8, 1, "packed", (0,)),),
        "ranks": (RankPlace(0, 0, 0, "host", "boot", "cpu", 17),),
        "environment": {"0": {"cores": 2, "gpus": []}},
        "facts": (LevelFacts("dp1", 10, 40, 1, (40,), {"gradient_collectives": None}, ("x",)),),
        "failures": (Failure(0, "start-up", "none"),),
        **changes,
    }
    return RunInfo(**values)


def batch(first: int, rows: int = 2) -> dict[str, list[int | None]]:
    """A batch in which each number tells its place."""
    columns = {name: [first + i for i in range(rows)] for name in NAMES}
    ends = [None] + [first + i for i in range(1, rows)]
    # No steps (kind 0): those have an end.
    return {**columns, "kind": [first + 1 + i for i in range(rows)], "end_ns": ends}


def write_stream(folder: Path, batches, rank=0, run_id="run-1", close=True) -> Path:
    spans = writer.SpanWriter(folder, rank, run_id)
    for columns in batches:
        spans.write(columns)
    if close:
        spans.close()
    return paths.rank_file(folder, rank)


@pytest.fixture
def run(tmp_path):
    """A complete run of one rank with three batches of two spans."""
    writer.write_run_info(tmp_path, run_info())
    write_stream(tmp_path, [batch(0), batch(10), batch(20)])
    return tmp_path


def test_run_info_comes_back(tmp_path):
    writer.write_run_info(tmp_path, run_info())
    assert reader.read_run_info(tmp_path) == run_info()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_machines_come_back_and_may_be_absent(tmp_path):
    (known,) = run_info().facts
    machine = (MachineUse(0, 12.5, cores=2, gpu=GpuUse(900.0, clock_reasons={"thermal": 1.0})),)
    writer.write_run_info(tmp_path, run_info(facts=(replace(known, machine=machine),)))
    assert reader.read_run_info(tmp_path).facts[0].machine == machine

    content = json.loads(paths.run_file(tmp_path).read_text())
    del content["facts"][0]["machine"]  # as earlier versions wrote it
    paths.run_file(tmp_path).write_text(json.dumps(content))
    assert reader.read_run_info(tmp_path) == run_info()


def test_spans_come_back(run):
    spans = reader.read_rank(run, 0)
    assert (spans.rank, spans.run_id, spans.complete, len(spans)) == (0, "run-1", True, 6)
    assert list(spans.columns) == NAMES
    assert spans.columns["begin_ns"].tolist() == [0, 1, 10, 11, 20, 21]
    assert spans.columns["end_ns"].tolist() == [reader.NULL, 1, reader.NULL, 11, reader.NULL, 21]


limits = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63) + 1, 2**63 - 1),
}
values = st.tuples(
    *(
        st.integers(*limits[kind])
        if name not in NULLABLE_SPAN_COLUMNS
        else st.none() | st.integers(*limits[kind])
        for name, kind in SPAN_COLUMNS
    )
)


@settings(max_examples=50, deadline=None)
@given(batches=st.lists(st.lists(values, min_size=1, max_size=5), max_size=4))
def test_whatever_is_written_comes_back(tmp_path_factory, batches):
    folder = tmp_path_factory.mktemp("run")
    write_stream(
        folder, [dict(zip(NAMES, zip(*rows, strict=True), strict=True)) for rows in batches], 3
    )
    spans = reader.read_rank(folder, 3)
    assert spans.complete
    rows = list(zip(*(spans.columns[name].tolist() for name in NAMES), strict=True))
    assert rows == [
        tuple(int(reader.NULL) if value is None else value for value in row)
        for some in batches
        for row in some
    ]


def test_value_out_of_range_is_not_written_as_another(tmp_path):
    spans = writer.SpanWriter(tmp_path, 0, "run-1")
    with pytest.raises(pa.ArrowInvalid):
        spans.write({**batch(0), "micro_step": [0, 2**15]})
    spans.close()


def test_each_batch_is_on_disk_once_it_is_written(tmp_path):
    """What a killed process leaves: nothing is held back in the process."""
    spans = writer.SpanWriter(tmp_path, 0, "run-1")
    for count in range(1, 4):
        spans.write(batch(10 * count))
        found = reader.read_rank(tmp_path, 0)
        assert (len(found), found.complete) == (2 * count, False)
    spans.close()
    assert reader.read_rank(tmp_path, 0).complete


def test_stream_is_readable_before_its_first_batch(tmp_path):
    writer.write_run_info(tmp_path, run_info(world_size=2))
    write_stream(tmp_path, [batch(0)])
    spans = writer.SpanWriter(tmp_path, 1, "run-1")
    found = reader.read_rank(tmp_path, 1)
    assert (len(found), found.complete) == (0, False)
    # A rank that was killed before it had a turn does not spoil what the others measured.
    assert load_summary(tmp_path).run.partial
    spans.close()


def test_stream_with_a_wrong_byte_anywhere(run):
    path = paths.rank_file(run, 0)
    whole = path.read_bytes()
    read = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            reader.read_rank(run, 0)
        except InputError:
            continue
        read += 1
    assert 0 < read < len(whole)


def test_stream_cut_at_every_byte(run):
    path = paths.rank_file(run, 0)
    whole = path.read_bytes()
    expected = reader.read_rank(run, 0).columns["begin_ns"].tolist()
    lengths = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            spans = reader.read_rank(run, 0)
        except InputError:
            # Only a cut before the end of the schema leaves nothing at all.
            assert not lengths
            continue
        assert not spans.complete, length
        assert len(spans) % 2 == 0
        assert spans.columns["begin_ns"].tolist() == expected[: len(spans)]
        lengths.append(len(spans))
    assert lengths == sorted(lengths)
    assert set(lengths) == {0, 2, 4, 6}


def test_cut_run_is_partial(run):
    path = paths.rank_file(run, 0)
    path.write_bytes(path.read_bytes()[:-20])
    summary = load_summary(run)
    assert summary.run.partial
    assert any("rank 0 was cut" in note for note in summary.notes)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"ARROW1\0\0", b'{"spans": []}', b"\xff" * 64]
)
def test_file_that_is_no_stream(run, content):
    paths.rank_file(run, 0).write_bytes(content)
    with pytest.raises(InputError, match=r"rank-00000\.arrows"):
        reader.read_rank(run, 0)


def test_empty_file_is_said_to_be_empty(run):
    path = paths.rank_file(run, 0)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"rank-00000\.arrows is not a span stream: it is empty\."):
        reader.read_rank(run, 0)


def test_file_of_another_rank(run):
    paths.rank_file(run, 0).rename(paths.rank_file(run, 1))
    with pytest.raises(InputError, match=r"was written by rank 0"):
        reader.read_rank(run, 1)


def test_missing_file(run):
    with pytest.raises(InputError, match=r"rank-00002\.arrows is missing"):
        reader.read_rank(run, 2)


@pytest.mark.parametrize(
    ("schema", "metadata", "message"),
    [
        (writer.SPAN_SCHEMA, {"schema_version": "99", "rank": "0"}, "has schema version 99"),
        (writer.SPAN_SCHEMA, {"rank": "0"}, "has schema version missing"),
        (writer.SPAN_SCHEMA, None, "has schema version missing"),
        (
            pa.schema([("begin_ns", pa.int64())]),
            {"schema_version": str(SCHEMA_VERSION), "rank": "0"},
            "has other columns",
        ),
        (writer.SPAN_SCHEMA, {"schema_version": str(SCHEMA_VERSION)}, "was written by rank ?"),
    ],
)
def test_stream_of_another_format(run, schema, metadata, message):
    path = paths.rank_file(run, 0)
    with pa.OSFile(str(path), "wb") as sink:
        pa.ipc.new_stream(sink, schema.with_metadata(metadata)).close()
    with pytest.raises(InputError) as raised:
        reader.read_rank(run, 0)
    assert message in raised.value.message


def test_file_of_another_run(run):
    write_stream(run, [batch(0)], run_id="run-2")
    with pytest.raises(InputError, match=r"belongs to the run run-2, not to run-1"):
        load_summary(run)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"no json", "cannot be read"),
        (b"[1, 2]", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"{}", "has schema version None"),
        (b'{"schema_version": 99}', "has schema version 99"),
        (b'{"schema_version": 1}', "cannot be read"),
        (b'{"schema_version": 1, "run_id": 5}', "cannot be read"),
    ],
)
def test_damaged_run_info(run, content, message):
    paths.run_file(run).write_bytes(content)
    with pytest.raises(InputError) as raised:
        reader.read_run_info(run)
    assert message in raised.value.message
    assert str(paths.run_file(run)) in raised.value.message


def test_no_run(tmp_path):
    for folder, message in ((tmp_path / "none", "is not a folder"), (tmp_path, "holds no run")):
        for read in (reader.read_run_info, reader.read_summary, load_summary):
            with pytest.raises(InputError, match=message):
                read(folder)


def test_run_without_spans(tmp_path):
    writer.write_run_info(tmp_path, run_info())
    with pytest.raises(InputError, match=r"holds no rank-\*\.arrows"):
        load_summary(tmp_path)


def test_summary(run):
    with pytest.raises(InputError, match=r"summary\.json is missing"):
        reader.read_summary(run)
    writer.write_json(paths.summary_file(run), {"schema_version": SCHEMA_VERSION, "levels": []})
    assert reader.read_summary(run) == {"schema_version": SCHEMA_VERSION, "levels": []}
    writer.write_json(paths.summary_file(run), {"schema_version": SCHEMA_VERSION + 1})
    with pytest.raises(InputError, match=r"has schema version"):
        reader.read_summary(run)


def test_json_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "run.json"
    writer.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        writer.write_json(path, {"a": object()})
    assert path.read_bytes() == b'{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_file_names():
    folder = Path("x")
    assert paths.rank_file(folder, 7) == Path("x/rank-00007.arrows")
    assert paths.rank_file(folder, 123456) == Path("x/rank-123456.arrows")


def test_rank_files(tmp_path):
    names = ("rank-00000.arrows", "rank-100000.arrows", "rank-00011.arrows")
    for name in (*names, "rank-1.arrows", "rank-00002.arrows.bak", "rank-0000x.arrows"):
        (tmp_path / name).touch()
    assert {rank: path.name for rank, path in paths.rank_files(tmp_path).items()} == {
        0: names[0],
        11: names[2],
        100000: names[1],
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-tiny", "gpt-tiny"),
        ("my model/../v2", "my-model-..-v2"),
        ("../..", "run"),
        ("\x1b[31mred", "31mred"),
        ("", "run"),
    ],
)
def test_default_folder(name, expected):
    folder = paths.default_folder(name, datetime(2026, 1, 2, 3, 4, 5))
    assert folder == Path(f"runs/{expected}-20260102-030405")


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: paths.claim_default_folder("x", now, tmp_path), range(8)))
    names = {f"x-20260102-030405{end}" for end in ("", *(f"-{n}" for n in range(2, 9)))}
    assert {folder.name for folder in folders} == names
    assert {folder.parent for folder in folders} == {tmp_path / "runs"}
    assert all(paths.holds_run(folder) for folder in folders)


def test_a_default_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(UsageError, match="cannot be used"):
        paths.claim_default_folder("x", datetime(2026, 1, 2, 3, 4, 5), tmp_path)


def test_claim_makes_the_folder_and_takes_it(tmp_path):
    folder = tmp_path / "a" / "b"
    paths.claim_folder(folder)
    assert paths.holds_run(folder)
    with pytest.raises(UsageError, match=r"already holds a run") as raised:
        paths.claim_folder(folder)
    assert "--out" in raised.value.remedy


@pytest.mark.parametrize("name", ["run.json", "summary.json", "rank-00003.arrows"])
def test_claim_refuses_what_holds_part_of_a_run(tmp_path, name):
    (tmp_path / name).write_bytes(b"kept")
    with pytest.raises(UsageError, match=r"already holds a run"):
        paths.claim_folder(tmp_path)
    assert (tmp_path / name).read_bytes() == b"kept"
    assert len(list(tmp_path.iterdir())) == 1


def test_claim_takes_a_folder_with_other_files(tmp_path):
    (tmp_path / "notes.txt").touch()
    paths.claim_folder(tmp_path)
    assert paths.run_file(tmp_path).exists()


def test_claim_refuses_a_file(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"is a file"):
        paths.claim_folder(file)
    with pytest.raises(UsageError, match=r"cannot be used: Not a directory"):
        paths.claim_folder(file / "below")


def test_of_two_claims_one_wins(tmp_path, monkeypatch):
    """Both have seen an empty folder."""
    monkeypatch.setattr(paths, "holds_run", lambda folder: False)
    paths.claim_folder(tmp_path)
    with pytest.raises(UsageError, match=r"already holds a run"):
        paths.claim_folder(tmp_path)


def test_nullable_columns_become_int64(run):
    columns = reader.read_rank(run, 0).columns
    assert all(columns[name].dtype == np.int64 for name in NULLABLE_SPAN_COLUMNS)


def test_a_record_that_cannot_be_opened_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match=r"rank-00003\.arrows cannot be written: No such file"):
        writer.SpanWriter(tmp_path / "gone", 3, "run-1")


def test_a_record_without_the_columns_that_came_later_is_read(tmp_path):
    path = paths.rank_file(tmp_path, 0)
    fields = [field for field in writer.SPAN_SCHEMA if field.name != "value"]
    schema = pa.schema(
        fields, metadata={"schema_version": str(SCHEMA_VERSION), "rank": "0", "run_id": "old"}
    )
    arrays = [pa.array([1], type=field.type) for field in fields]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch(arrays, schema=schema))
    spans = reader.read_rank(tmp_path, 0)
    assert spans.complete
    assert spans.columns["samples"].tolist() == [1]
    assert spans.columns["value"].tolist() == [writer.NULL]
