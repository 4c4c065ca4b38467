"""Files that lie: no stack trace, no hang, bounded memory, nothing wrong unnoticed, nothing run."""

import ast
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddp_profiler.analysis.soundness import contradictions, examine
from ddp_profiler.errors import InputError
from ddp_profiler.load import load_report, load_summary
from ddp_profiler.record import checks, parts, paths, reader, writer
from ddp_profiler.report import plots
from ddp_profiler.report.page import render
from ddp_profiler.schema import CONDENSED_COLUMNS, SPAN_COLUMNS, SpanKind, Variant
from tests.faults import hostile_inputs as hostile

ROOT = Path(__file__).resolve().parents[2]
SLICE = int(os.environ.get("DDP_PROFILER_HOSTILE_INPUTS", "300"))
"""Inputs to try. The slice of continuous integration; benchmarks/hostile.py tries 10,000 more."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    return hostile.Seeds(tmp_path_factory.mktemp("seeds"))


def test_generated_inputs():
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.hostile_inputs", str(SLICE), "0"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120 + SLICE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["inputs"].values()) == SLICE
    assert set(found["inputs"]) == set(hostile.TARGETS)
    # If none were refused, or none read, the generator would be of no use.
    assert min(found["exit_codes"]["0"], found["exit_codes"]["3"]) > SLICE // 10
    assert not found["failures"], "\n".join(map(str, found["failures"]))


@pytest.mark.parametrize(
    "name",
    [
        "page:101604",
        "spans:103605",
        "traces:103840",
        "spans:13365",
        "run.json:4872",
        "predict:8277",
        "compare:2759",
        "captured:4983",
        "odd files:1666",
    ],
)
def test_inputs_that_once_got_through(seeds, name):
    target, _, number = name.partition(":")
    tally = hostile.Tally()
    hostile.try_input(target, int(number), seeds, tally)
    assert tally.inputs == {target: 1}
    assert not tally.failures


def test_the_judge_finds_what_must_not_come_out():
    judge = hostile.judge
    assert not judge(["analyze"], 0, "fine\n", "")
    assert not judge(["analyze"], 3, "", "a\nb\n")
    assert judge(["analyze"], -6, "", "")
    assert judge(["analyze"], 3, "", "a\nb\nc\n")
    assert judge(["analyze"], 3, "", "")
    assert judge(["analyze"], 3, "", "Traceback (most recent call last):")
    for text in ("\x1b[31m", "a\u202eb", "\x9b2J", "bell\x07"):
        assert judge(["analyze"], 0, text, "")
        assert judge(["analyze"], 3, "", text)
    assert judge(["page"], 0, "<script>", "")
    with pytest.raises(ValueError):
        judge(["analyze", "--json"], 0, '{"a": NaN}', "")


# -- what must be noticed ----------------------------------------------------------------------


def changed(seeds, change, rank=1):
    """A run in which one rank's columns are changed."""
    work = hostile.fresh(seeds)
    columns = {k: v.astype(np.int64) for k, v in reader.read_rank(work, rank).columns.items()}
    columns = change(columns) or columns
    info = reader.read_run_info(work)
    paths.rank_file(work, rank).unlink()
    stream = writer.SpanWriter(work, rank, info.run_id)
    stream.write_columns(columns)
    stream.close()
    return work


def spans(columns, kind):
    return np.flatnonzero(columns["kind"] == int(kind))


def flip_step(columns):
    columns["end_ns"][spans(columns, SpanKind.STEP)[5]] ^= 1 << 33


def flip_part(columns):
    columns["end_ns"][spans(columns, SpanKind.FORWARD)[5]] ^= 1 << 33


def early_part(columns):
    columns["begin_ns"][spans(columns, SpanKind.FORWARD)[5]] -= 1 << 33


def longer_part(columns):
    """Within the step, so that only the sum of the parts gives it away."""
    at = spans(columns, SpanKind.FORWARD)[5]
    steps = spans(columns, SpanKind.STEP)
    inside = steps[(columns["begin_ns"][steps] <= columns["begin_ns"][at])][-1]
    columns["end_ns"][at] = columns["end_ns"][inside]


def swapped_steps(columns):
    steps = spans(columns, SpanKind.STEP)
    # No figure is of those under torch.profiler, which are not looked at.
    first, second = steps[columns["variant"][steps] == Variant.INSTRUMENTED][[-2, -1]]
    for name in ("begin_ns", "end_ns"):
        columns[name][[first, second]] = columns[name][[second, first]]


def foreign_level(columns):
    columns["level"][:3] = 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip_step, "contradicts itself"),
        (flip_part, "contradicts itself"),
        (early_part, "outside of their step"),
        (longer_part, "together are longer than the step"),
        (swapped_steps, "go back in time"),
        (foreign_level, "levels that the run has not"),
    ],
)
def test_contradictions_are_told(seeds, change, words):
    assert not any("contradict" in note for note in load_summary(seeds.run).notes)
    notes = load_summary(changed(seeds, change)).notes
    assert any(words in note and "rank 1" in note for note in notes), notes


def negative(columns):
    at = spans(columns, SpanKind.BACKWARD)[3]
    columns["end_ns"][at] = columns["begin_ns"][at] - 1


def repeated(columns):
    at = spans(columns, SpanKind.STEP)[:1]
    return {name: np.concatenate((values, values[at])) for name, values in columns.items()}


def endless(columns):
    columns["end_ns"][spans(columns, SpanKind.STEP)[2]] = writer.NULL


def far(columns):
    columns["begin_ns"][:] = -(1 << 62)


def no_bytes(columns):
    columns["bytes"][spans(columns, SpanKind.GRADIENT)[0]] = -5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (negative, "ends before it begins"),
        (repeated, "is there already"),
        (endless, "step without an end"),
        (far, "30 years away"),
        (no_bytes, "impossible bytes"),
    ],
)
def test_what_cannot_have_been_recorded_is_refused(seeds, change, words):
    with pytest.raises(InputError, match=words):
        load_summary(changed(seeds, change))


def test_a_rank_given_twice_is_noticed(seeds):
    work = hostile.fresh(seeds)
    whole = paths.rank_file(work, 0).read_bytes()
    paths.rank_file(work, 1).write_bytes(whole)
    with pytest.raises(InputError, match="was written by rank 0"):
        load_summary(work)
    # And where somebody has made it say that it is the other one.
    columns = reader.read_rank(work, 0).columns
    copied = changed(seeds, lambda _: dict(columns))
    assert any("one is a copy" in note for note in load_summary(copied).notes)
    # By a name with more zeros.
    work = hostile.fresh(seeds)
    (work / "rank-000001.arrows").write_bytes(whole)
    assert set(paths.rank_files(work)) == {0, 1}
    assert paths.rank_files(work)[1].name == "rank-00001.arrows"
    paths.rank_file(work, 1).unlink()
    assert set(paths.rank_files(work)) == {0}


def test_a_rank_that_the_run_has_not_is_refused(seeds):
    work = hostile.fresh(seeds)
    shutil.copy(paths.rank_file(work, 1), paths.rank_file(work, 2))
    with pytest.raises(InputError, match="a rank that the run of 2 ranks does not have"):
        load_summary(work)


def test_times_that_are_rounded_are_no_copies():
    """Made by hand, as for a test, records of several ranks may have the same times."""
    made = {name: np.zeros(8, np.int64) for name, _ in SPAN_COLUMNS}
    made["kind"][:] = SpanKind.STEP
    made["step"][:] = np.arange(8)

    def notes(unit):
        made["begin_ns"][:] = np.arange(8) * unit
        made["end_ns"][:] = made["begin_ns"] + unit
        return contradictions(dict.fromkeys((0, 1), examine(made, 1)))

    assert notes(10**6) == ()
    assert "one is a copy" in notes(10**6 + 1)[0]


@pytest.mark.parametrize("size", [0, 3, 6, 8, 100])
def test_a_record_that_was_never_begun_is_a_missing_one(seeds, size):
    """A rank that was killed, or whose disk was full, before its schema was written."""
    work = hostile.fresh(seeds)
    path = paths.rank_file(work, 1)
    data = path.read_bytes()
    path.unlink()
    without = load_summary(work)
    path.write_bytes(data[:size])
    summary = load_summary(work)
    assert summary.run.partial
    assert summary.levels == without.levels
    lost, note = summary.notes[:2]
    assert (lost, *summary.notes[2:]) == without.notes
    assert "rank 1 is missing" in lost
    assert note.endswith("ends before anything was recorded: rank-00001.arrows.")
    assert hostile.call(["trace", str(work), "--jobs", "1"])[0] == 0
    other = seeds.home / "other part"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(seeds.run, other)
    merged = parts.merge((work, other), seeds.home / f"whole {size}")
    assert merged.missing == ()
    assert load_summary(seeds.home / f"whole {size}").notes == load_summary(seeds.run).notes


def test_nothing_but_records_that_were_never_begun(seeds):
    work = hostile.fresh(seeds)
    for rank in (0, 1):
        paths.rank_file(work, rank).write_bytes(b"")
    with pytest.raises(InputError, match="nothing was measured"):
        load_summary(work)
    # What is damaged is no such file.
    paths.rank_file(work, 1).write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match=r"rank-00001\.arrows is not a span stream"):
        load_summary(work)


@pytest.mark.parametrize("version", [0, 2, 99, "1", True, 1.0, None])
def test_unknown_versions_are_refused(seeds, version):
    work = hostile.fresh(seeds)
    info = json.loads((work / "run.json").read_text())
    (work / "run.json").write_text(json.dumps({**info, "schema_version": version}))
    with pytest.raises(InputError, match=r"has schema version .*; this version reads 1"):
        load_summary(work)


def test_a_record_that_unpacks_is_refused_before_it_does(seeds):
    work = hostile.fresh(seeds)
    zeros = {name: np.zeros(1 << 20, np.int64) for name in writer.SPAN_SCHEMA.names}
    data = hostile.stream_bytes(
        zeros,
        metadata={"rank": "0", "run_id": seeds.run_id},
        options=pa.ipc.IpcWriteOptions(compression="zstd"),
    )
    assert len(data) < 1 << 20
    paths.rank_file(work, 0).write_bytes(data)
    before = pa.total_allocated_bytes()
    with pytest.raises(InputError, match="is compressed"):
        reader.read_rank(work, 0)
    assert pa.total_allocated_bytes() - before < 4 << 20


@pytest.mark.parametrize("name", ["rank-00001.arrows", "run.json", "kineto/dp2/rank-00000.json.gz"])
def test_a_pipe_is_not_waited_for(seeds, name):
    work = hostile.fresh(seeds)
    (work / name).unlink()
    os.mkfifo(work / name)
    codes = []
    read = threading.Thread(
        target=lambda: codes.extend(
            hostile.call([command, str(work)])[0] for command in ("analyze", "trace")
        ),
        daemon=True,
    )
    read.start()
    read.join(60)
    # Traces are no part of what analyze shows, and those of a rank may be missing.
    assert codes == ([0, 0] if "kineto" in name else [3, 3])


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_what_a_batch_unpacks_to_is_known_before(codec):
    few = {name: np.arange(3000) for name in writer.SPAN_SCHEMA.names}
    data = hostile.stream_bytes(few, options=pa.ipc.IpcWriteOptions(compression=codec))
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(data))
    messages.read_next_message()
    message = messages.read_next_message()
    found = checks.unpacked_bytes(message.metadata.to_pybytes(), memoryview(message.body))
    if codec is None:
        assert found is None
    else:
        kinds = [pa.type_for_alias(column[1]).bit_width // 8 for column in SPAN_COLUMNS]
        assert found == pytest.approx(3000 * sum(kinds), rel=0.1)


def test_a_record_that_unpacks_to_too_much_is_refused(seeds, tmp_path):
    work = tmp_path / "run"
    shutil.copytree(seeds.run, work)
    rows = 4_000_000
    bomb = {name: np.zeros(rows, np.int64) for name in writer.SPAN_SCHEMA.names}
    bomb |= {name: np.zeros(rows, np.int64) for name, _ in CONDENSED_COLUMNS}
    path = paths.rank_file(work, 1)
    run_id = reader.read_rank(work, 1).run_id
    path.write_bytes(writer.condensed_stream(1, run_id, bomb))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match="unpacks to more than"):
        load_summary(work)


# -- names and paths ---------------------------------------------------------------------------


def poisoned(value):
    """Every text that is no key of ours is an attack."""
    if isinstance(value, dict):
        return {key: poisoned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    return f"{value}{hostile.BOMB}" if isinstance(value, str) else value


def test_names_are_shown_without_their_effects(seeds):
    """In all that shows a run, a trace, or an error about either."""
    work = hostile.fresh(seeds)
    info = poisoned(json.loads((work / "run.json").read_text()))
    # Ids of levels are names of folders, and cannot hold a slash.
    for entry in (*info["levels"], *info["facts"]):
        entry["id"] = entry["id"].replace("/", "").replace("\0", "")
    info["run_id"] = info["run_id"].replace(hostile.BOMB, "")
    for fact in info["facts"]:
        fact["reduced"] = [{**one, "name": one["name"] + hostile.BOMB} for one in fact["reduced"]]
    names = ("phase", "message", "hostname")
    info["failures"] = [{"rank": 0, **dict.fromkeys(names, hostile.BOMB)}]
    (work / "run.json").write_text(json.dumps(info))
    copy = seeds.home / "copy"
    shutil.copytree(work, copy)
    trace = seeds.home / f"rank0 {hostile.BOMB.replace('/', '').replace(chr(0), '')}.json"
    made = poisoned(json.loads(seeds.trace))
    made["traceEvents"] = [
        {**one, "cat": old["cat"]}
        for one, old in zip(
            made["traceEvents"], json.loads(seeds.trace)["traceEvents"], strict=True
        )
    ]
    trace.write_text(json.dumps(made))
    timeline = seeds.home / "poisoned.json.gz"
    shown = 0
    for arguments in (
        ["analyze", str(work)],
        ["analyze", str(work), "--json"],
        ["page", str(work)],
        ["predict", str(work), "--dp", "4", "--ranks-per-node", "4"],
        ["predict", str(work), "--dp", "4", "--ranks-per-node", "4", "--json"],
        ["compare", str(work), str(copy), "--anyway"],
        ["compare", str(work), str(copy), "--anyway", "--json"],
        ["merge", str(work), str(copy), "--out", str(seeds.home / f"m{hostile.BOMB[:8]}")],
        ["trace", str(trace), "--timeline", str(timeline)],
        ["trace", str(trace), "--json"],
        ["trace", str(seeds.home / f"no {hostile.BOMB}".replace("\0", ""))],
        ["trace", str(work)],
    ):
        code, out, err = hostile.call(arguments)
        assert code in (0, 2, 3), (arguments, err)
        assert not hostile.judge(arguments, code, out, err), arguments
        seen = "u202e" in out + err or "owned" in out + err
        shown += seen
    # Else nothing of it had come so far.
    assert shown >= 9
    text = gzip.decompress(timeline.read_bytes()).decode()
    json.loads(text)
    assert not {c for c in text if not c.isprintable() and c not in "\n"}


@pytest.mark.parametrize("id", ["..", ".", "../../x", "/etc", "a/b", "a\\b", "", "a\0b", "x" * 300])
def test_ids_of_levels_cannot_lead_outside(seeds, id):
    work = hostile.fresh(seeds)
    info = json.loads((work / "run.json").read_text())
    info["levels"][0]["id"] = info["facts"][0]["id"] = id
    (work / "run.json").write_text(json.dumps(info))
    with pytest.raises(InputError, match="a level's id is no name of a folder"):
        reader.read_run_info(work)


def test_writers_replace_links_instead_of_following_them(seeds):
    """A run folder from elsewhere that is reported on, whose files point to one's own."""
    work, own = hostile.fresh(seeds), seeds.home / "own"
    own.write_text("mine")
    for name in ("report.html", "summary.json"):
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(own)
    found = load_report(seeds.run)
    page = render.save(found.summary, found.details, found.outlook, work)
    # The name of a file that is not whole yet can be guessed.
    paths.half_written(paths.summary_file(work), os.getpid()).symlink_to(own)
    writer.write_json(paths.summary_file(work), {"schema_version": 1})
    (work / "plots").mkdir()
    (work / "plots" / "step_parts.png").symlink_to(own)
    plots.save_all(found.summary, work)
    assert own.read_text() == "mine"
    assert not page.is_symlink()
    elsewhere = seeds.home / "elsewhere"
    elsewhere.mkdir()
    other = hostile.fresh(seeds)
    (other / "plots").symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        plots.save_all(found.summary, other)
    assert not list(elsewhere.iterdir())


def test_what_is_collected_over_the_network_has_no_path_of_its_own(tmp_path):
    """A sender states its rank's number, a size and a digest, and nothing else."""
    with parts.PartWriter(tmp_path, 3, 4, "0" * 64)._file:
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".rank-00003.arrows.partial"]
    taker = parts.PartWriter(tmp_path / "..", 4, 10**18, "0" * 64)
    try:
        taker.write(b"few")
        with pytest.raises(InputError, match="3 of 1000000000000000000"):
            taker.finish()
    finally:
        taker.discard()


# -- nothing from a file is run ----------------------------------------------------------------

_RUNS = {
    "eval", "exec", "compile", "__import__", "import_module", "run_path", "run_module",
    "_run_module_as_main", "system", "popen", "Popen", "check_output", "check_call", "Unpickler",
    "loads", "load", "unsafe_load", "full_load", "load_module", "allow_pickle", "read_pickle",
}  # fmt: skip
_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "joblib"}
ALLOWED = {
    # The command's module by the name of a command of ours.
    ("cli/__init__.py", "import_module"),
    # The package's own api, by the name of one of its functions.
    ("__init__.py", "import_module"),
    ("workload/__init__.py", "import_module"),
    # A factory and a script that the user names on the command line: what they are for.
    ("workload/importing.py", "import_module"),
    ("script.py", "_run_module_as_main"),
    ("script.py", "run_path"),
    ("measure/nccl.py", "run_path"),
    ("script.py", "compile"),
    ("script.py", "exec"),
    # The vendor's library.
    ("measure/nvidia.py", "import_module"),
    ("doctor/gpus.py", "import_module"),
    # The user's script, with this interpreter and torchrun; torch in a process of its own.
    ("launches.py", "Popen"),
    ("doctor/software.py", "Popen"),
    # JSON.
    ("doctor/software.py", "json.loads"),
    ("trace/groups.py", "json.loads"),
    ("trace/reader.py", "json.loads"),
    # Micro-batches of this run's ranks, through torch.distributed, which pickles them itself.
    ("measure/proof.py", "pickle"),
    ("measure/proof.py", "pickle.loads"),
    # Micro-batches that this run's ranks keep until their script ends, beside the run folder's
    # files; weights only, or where that cannot be, only if this user owns the file.
    ("measure/scripts/replay.py", "pickle"),
    ("measure/scripts/replay.py", "torch.load"),
    # A script's model is compiled, not text.
    ("measure/scripts/construction.py", "torch.compile"),
}


def _found(path):
    name = path.relative_to(ROOT / "ddp_profiler").as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [one.name for one in node.names]
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module or "")
            yield from ((name, one) for one in modules if one.split(".")[0] in _MODULES)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _RUNS:
                yield name, node.func.id
            elif isinstance(node.func, ast.Attribute) and node.func.attr in _RUNS:
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                own = node.func.attr in ("load", "loads", "system", "compile")
                if owner not in ("re", "platform") and not (own and owner in ("self", "")):
                    known = owner in ("json", "pickle", "torch")
                    yield name, f"{owner}.{node.func.attr}" if known else node.func.attr


def test_no_data_is_run():
    """Static: each place of the package that could run what it is given is one of these few."""
    found = {one for path in (ROOT / "ddp_profiler").rglob("*.py") for one in _found(path)}
    assert found - ALLOWED == set()
    # And the search finds something: these are there.
    assert ("script.py", "exec") in found
    assert ("measure/proof.py", "pickle.loads") in found
