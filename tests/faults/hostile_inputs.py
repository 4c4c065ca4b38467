"""Hostile inputs for every reader: generators from a seed, and the judge of what comes out.

An input is a set of files made from sound ones. It is given to the command line, in this
process, as a user would; the judge knows what may come out: a result, or one of our own errors in
one or two lines without control characters, in bounded time and memory.
"""

import contextlib
import copy
import faulthandler
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from ddp_profiler.cli import error_text, main
from ddp_profiler.condensing import condensed_file
from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.record.writer import CONDENSED_SCHEMA, NULL, SPAN_SCHEMA
from tests.unit import kineto, traced_job

SEED = Path(__file__).with_name("seed_run.tar.gz")
"""A study at dp = 1 and 2 with 2 steps under torch.profiler, as the tool wrote it."""

WIDE = ("--ranks-per-node", "64", "--bandwidth-gbps", "10")
"""Without it nothing is known of networks between nodes, and nothing is predicted."""

LIMIT_S = 20.0
"""So long one input may take: far more than any needs, far less than a hang."""
LIMIT_BYTES = 512 << 20
"""So much memory one input may take beyond what the process holds."""

BOMB = "\x1b]0;owned\x07\x1b[31m[red]x[/red]\u202e\x00\r<script>alert(1)</script>"
_TEXTS = ("", BOMB, "../../../etc/passwd", "/etc", "a" * 70_000, "\ud800", "dp1", "NaN", "-1", "é")
_NUMBERS = (
    0, -1, 1, 2, 3, 255, 1000, 2**31 - 1, -(2**31), 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63),
    2**63, 2**64, 10**30, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e18, 1e308, -1e308, float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip
_MOST_PLACES = 5000
"""Lists are no longer repeated in a value that has grown to so many: it would grow for ever."""
_SMALL = (-1, 0, 1, 99, 2**31 - 1, -(2**31), 32767)
_ODD_BYTES = (b"\0" * 9, b"\xff" * 9, b"\xff\xfe", b"\x1b[2J", b"\xed\xa0\x80")
_ODD_TEXT = (b"[" * 5000, b'{"a":' * 5000, b'"', b",", b"9" * 400, b"e999")
_NS = (0, -1, 1, 10**6, -(10**9), 2**31, 2**53, 2**62, 2**63 - 1, NULL, NULL + 1, 10**18)


# --------------------------------------------------------------------------------------------
# Generators


def json_value(draw, depth=0):
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(_NUMBERS)
    if kind == 3:
        return draw.choice(_TEXTS)
    if kind == 4:
        return draw.choice((None, True, False))
    if kind == 5:
        return draw.choice(([], {}))
    if kind == 6 and depth == 0:
        nested = []
        for _ in range(draw.choice((3, 50, 2_000, 100_000))):
            nested = [nested] if draw.random() < 0.99 else {"a": nested}
        return nested
    if depth < 2:
        return [json_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return draw.choice(_NUMBERS)


def places_of(value):
    """All places of a JSON value, as (holder, key)."""
    found, left = [], [value]
    while left:
        one = left.pop()
        entries = one.items() if isinstance(one, dict) else enumerate(one)
        for key, inner in list(entries):
            found.append((one, key))
            if isinstance(inner, (dict, list)):
                left.append(inner)
    return found


def mutate_json(draw, value):
    """Changes some places of a JSON value."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        found = places_of(value)
        if not found:
            return value
        # Few keys stand at the top, and those matter most.
        if draw.random() < 0.3 and isinstance(value, dict) and value:
            holder, key = value, draw.choice(list(value))
        else:
            holder, key = draw.choice(found)
        how, old = draw.randrange(10), holder[key]
        number = isinstance(old, (int, float)) and not isinstance(old, bool)
        if number and how < 4:
            holder[key] = draw.choice((-old, old + 1, old - 1, old * 1000, old * 2**40, 0))
        elif how < 6:
            holder[key] = json_value(draw)
        elif how == 6:
            del holder[key]
        elif how == 7 and isinstance(old, list) and old and len(found) < _MOST_PLACES:
            holder[key] = draw.choice((old * 2, old[::-1], old[:-1], [old[0]] * 300))
        elif how == 8 and isinstance(holder, dict):
            holder[draw.choice((*_TEXTS, key + "_"))] = holder.pop(key)
        else:
            other = draw.choice(found)
            with contextlib.suppress(RecursionError):
                holder[key] = copy.deepcopy(other[0][other[1]])
    return value


def dumps(value):
    """JSON text, also of what is nested too deeply for the library, and with NaN."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 100_000 + "]" * 100_000


def mutate_bytes(draw, data, others=(b"",)):
    """Changes some bytes of a file."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        size = len(data)
        at = draw.randrange(size + 1)
        how = draw.randrange(9)
        if how == 0:
            del data[at:]
        elif how == 1:
            for _ in range(draw.choice((1, 2, 16))):
                if data:
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif how == 2:
            del data[at : at + draw.choice((1, 4, 8, 100, 5000))]
        elif how == 3:
            data[at:at] = data[at : at + draw.choice((1, 8, 200, 5000))]
        elif how == 4:
            data[at:at] = draw.choice(
                (b"\0" * 9, b"\xff" * 9, b"\xff\xfe", b"\x1b[2J", b"\xed\xa0\x80")
            )
        elif how == 5:
            number = int(draw.choice((0, 1, -1, 2**31 - 1, -(2**31), 2**30, 2**63 - 1, -(2**63))))
            wide = draw.random() < 0.5 or abs(number) > 2**31
            packed = struct.pack("<q", number) if wide else struct.pack("<i", number)
            at &= ~7
            data[at : at + len(packed)] = packed
        elif how == 6:
            other = draw.choice(others)
            begin = draw.randrange(len(other) + 1)
            data[at:] = other[begin:]
        elif how == 7:
            data[at : at + 8] = bytes(draw.randrange(256) for _ in range(8))
        else:
            data[at:at] = draw.choice(
                (b"[" * 5000, b'{"a":' * 5000, b'"', b",", b"9" * 400, b"e999")
            )
    return bytes(data)


def _array(values, one):
    if pa.types.is_dictionary(one.type):
        return pa.array(values, type=one.type.value_type, safe=False).dictionary_encode()
    if values.dtype == object:
        return pa.array(list(values), type=one.type)
    return pa.array(
        values, type=one.type, safe=False, mask=values == NULL if one.nullable else None
    )


def stream_bytes(columns, schema=SPAN_SCHEMA, metadata=None, options=None, batches=1):
    """A span stream with these columns."""
    sink = io.BytesIO()
    meta = {"schema_version": "1", "rank": "0", "run_id": "run-1", **(metadata or {})}
    arrays = [_array(columns[one.name], one) for one in schema]
    with pa.ipc.new_stream(sink, schema.with_metadata(meta), options=options) as stream:
        for _ in range(batches):
            stream.write_batch(pa.record_batch(arrays, schema=schema))
    return sink.getvalue()


def mutate_columns(draw, columns, schema=SPAN_SCHEMA):
    """Changes rows of a rank's spans; what no longer fits its type wraps around."""
    columns = {name: values.astype(np.int64) for name, values in columns.items()}
    rows = len(columns["kind"])
    for _ in range(draw.choice((1, 1, 2, 5))):
        name = draw.choice(list(columns))
        some = np.array(sorted(draw.sample(range(rows), min(rows, draw.choice((1, 3, 40))))), int)
        how = draw.randrange(9)
        if how == 0:
            value = draw.choice(
                _NS
                if name.endswith("_ns") or name == "value"
                else (-1, 0, 1, 99, 2**31 - 1, -(2**31), 32767)
            )
            columns[name][some] = value
        elif how == 1:
            columns[name][some] = -columns[name][some]
        elif how == 2:
            columns = {key: np.delete(values, some) for key, values in columns.items()}
        elif how == 3:
            columns = {
                key: np.concatenate((values, values[some])) for key, values in columns.items()
            }
        elif how == 4:
            order = np.array(draw.sample(range(rows), rows), int)
            columns = {key: values[order] for key, values in columns.items()}
        elif how == 5:
            order = np.array(draw.sample(range(rows), rows), int)
            columns[name] = columns[name][order]
        elif how == 6:
            columns[name][:] = draw.choice((0, 1, -1, NULL, 2**40))
        elif how == 7:
            columns["begin_ns"], columns["end_ns"] = columns["end_ns"], columns["begin_ns"]
        else:
            columns[name][some] += draw.choice((1, -1, 10**9, -(10**9), 2**62))
        rows = len(columns["kind"])
        if not rows:
            break
    for one in schema:
        width = np.dtype(one.type.to_pandas_dtype())
        null = columns[one.name] == NULL
        wrapped = columns[one.name].astype(width).astype(np.int64)
        columns[one.name] = np.where(null, NULL, wrapped) if one.nullable else wrapped
    return columns


def odd_schema(draw, columns, metadata):
    """A stream whose schema, metadata or encoding is not what it should be."""
    how = draw.randrange(8)
    if how == 0:
        key = draw.choice(list(metadata))
        value = draw.choice(("0", "2", "99999999999999999999", "", "\x1b[31m", "-1", "1" * 100_000))
        return stream_bytes(columns, metadata={**metadata, key: value})
    if how == 1:
        kept = [one for one in SPAN_SCHEMA if one.name != draw.choice(SPAN_SCHEMA.names)]
        return stream_bytes(columns, pa.schema(kept), metadata)
    if how == 2:
        name = draw.choice(SPAN_SCHEMA.names)
        other = draw.choice((pa.float64(), pa.string(), pa.int64(), pa.list_(pa.int64())))
        fields = [one if one.name != name else pa.field(name, other) for one in SPAN_SCHEMA]
        given = dict(columns)
        if other == pa.string():
            given[name] = np.array([BOMB] * len(columns["kind"]), object)
        if pa.types.is_list(other):
            given[name] = np.array([[1]] * len(columns["kind"]) + [None], object)[:-1]
        return stream_bytes(given, pa.schema(fields), metadata)
    if how == 3:
        codec = draw.choice(("lz4", "zstd"))
        options = pa.ipc.IpcWriteOptions(compression=codec)
        zeros = {name: np.zeros(draw.choice((10, 200_000)), np.int64) for name in SPAN_SCHEMA.names}
        return stream_bytes(zeros, metadata=metadata, options=options, batches=draw.choice((1, 30)))
    if how == 4:
        fields = [
            pa.field(one.name, pa.dictionary(pa.int32(), one.type), one.nullable)
            if one.name == "level"
            else one
            for one in SPAN_SCHEMA
        ]
        return stream_bytes(columns, pa.schema(fields), metadata)
    if how == 5:
        shuffled = draw.sample(list(SPAN_SCHEMA), len(SPAN_SCHEMA))
        return stream_bytes(columns, pa.schema(shuffled), metadata)
    if how == 6:
        return stream_bytes(columns, metadata=metadata) * 2
    more = {f"key{number}": BOMB for number in range(1000)}
    return stream_bytes(columns, metadata={**metadata, **more}, batches=50)


def bomb(draw):
    """Gzip that unpacks to far more than it is."""
    filling = draw.choice((b"\0", b" ", b'{"traceEvents":[', b"[", b'"', b"[1,", b'{"a":"'))
    begin = draw.choice((b"", b'{"traceEvents": [', b'{"traceEvents": [{"name": "'))
    return gzip.compress(begin + filling * ((8 << 20) // len(filling)), 9)


def put_odd_file(draw, path):
    """Puts something at a path that is no ordinary file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    how = draw.randrange(8)
    if how == 0:
        path.mkdir()
    elif how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.symlink_to(draw.choice(("/dev/zero", "/dev/full", "/dev/null", "/dev/random")))
    elif how == 3:
        path.symlink_to(path.name)
    elif how == 4:
        path.symlink_to("/nowhere/at/all")
    elif how == 5:
        path.symlink_to("/etc/passwd")
    elif how == 6:
        path.write_bytes(b"")
    else:
        with path.open("wb") as file:
            file.truncate(draw.choice((1, 4096, 1 << 22)))


# --------------------------------------------------------------------------------------------
# Targets


@dataclass
class Seeds:
    """Sound files that inputs are made from."""

    home: Path
    run: Path = field(init=False)
    copy: Path = field(init=False)
    traces: Path = field(init=False)
    timeline: int = 0

    def __post_init__(self):
        with tarfile.open(SEED) as archive:
            archive.extractall(self.home / "seed", filter="data")
        self.run = self.home / "seed" / "run"
        self.copy = self.home / "other"
        shutil.copytree(self.run, self.copy)
        info = json.loads((self.copy / "run.json").read_text())
        self.run_id = info["run_id"]
        info["run_id"] = "other"
        (self.copy / "run.json").write_text(json.dumps(info))
        for rank in (0, 1):
            self.columns = reader.read_rank(self.run, rank).columns
            stream = writer.SpanWriter(self.copy, rank, "other")
            stream.write_columns(self.columns)
            stream.close()
        self.columns = reader.read_rank(self.run, 0).columns
        self.traces = self.home / "traces"
        self.traces.mkdir()
        job = traced_job.make_job(3, world=2)
        job.write(self.traces)
        self.trace = kineto.training(5, steps=2)[0].text()
        self.small = kineto.training(6, steps=1, layers=2)[0]


def fresh(seeds, name="work"):
    """A copy of the sound run that an input may change."""
    work = seeds.home / name
    if work.exists():
        # A mutation may have put anything there.
        shutil.rmtree(work)
    shutil.copytree(seeds.run, work)
    return work


def _metadata(seeds, rank=0):
    return {"schema_version": "1", "rank": str(rank), "run_id": seeds.run_id}


def change_run_json(draw, seeds, work):
    path = work / "run.json"
    if draw.random() < 0.7:
        path.write_bytes(
            dumps(mutate_json(draw, json.loads(path.read_text()))).encode(errors="surrogatepass")
        )
    else:
        path.write_bytes(mutate_bytes(draw, path.read_bytes(), (b"", seeds.trace[:3000])))


def change_rank_file(draw, seeds, work):
    rank = draw.randrange(2)
    path = work / f"rank-{rank:05d}.arrows"
    how = draw.random()
    if how < 0.4:
        path.write_bytes(mutate_bytes(draw, path.read_bytes(), (b"", path.read_bytes()[:2000])))
    else:
        columns = reader.read_rank(work, rank).columns
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError):
            path.write_bytes(
                stream_bytes(mutate_columns(draw, columns), metadata=_metadata(seeds, rank))
                if how < 0.85
                else odd_schema(draw, columns, _metadata(seeds, rank))
            )


def change_condensed_file(draw, seeds, work):
    """One rank's file condensed, as it comes from another node, and changed."""
    rank = draw.randrange(2)
    path = work / f"rank-{rank:05d}.arrows"
    path.write_bytes(condensed_file(work, rank))
    if draw.random() < 0.4:
        path.write_bytes(mutate_bytes(draw, path.read_bytes(), (b"", path.read_bytes()[:2000])))
        return
    columns = mutate_columns(draw, reader.read_rank(work, rank).columns, CONDENSED_SCHEMA)
    with contextlib.suppress(pa.ArrowInvalid, OverflowError):
        path.write_bytes(writer.condensed_stream(rank, seeds.run_id, columns))


def target_analyze(draw, seeds):
    """run.json, to the table and the JSON."""
    work = fresh(seeds)
    change_run_json(draw, seeds, work)
    return ["analyze", str(work), *(["--json"] if draw.random() < 0.3 else [])]


def target_spans(draw, seeds):
    """Arrow streams."""
    work = fresh(seeds)
    change_rank_file(draw, seeds, work)
    return ["analyze", str(work), *(["--json"] if draw.random() < 0.3 else [])]


def target_condensed(draw, seeds):
    """Condensed records, beside whole ones or not, to all that reads them."""
    work = fresh(seeds)
    for rank in (0, 1):
        if draw.random() < 0.5:
            paths.rank_file(work, rank).write_bytes(condensed_file(work, rank))
    change_condensed_file(draw, seeds, work)
    out = seeds.home / "joined"
    shutil.rmtree(out, ignore_errors=True)
    return draw.choice(
        (
            ["analyze", str(work)],
            ["analyze", str(work), "--json"],
            ["page", str(work)],
            ["predict", str(work), "--dp", "4", *WIDE],
            ["trace", str(work), "--jobs", "1"],
            ["tables", str(work)],
            # The whole records beside it.
            ["merge", str(work), str(seeds.run), "--out", str(out)],
        )
    )


def target_page(draw, seeds):
    """Both, to the page; the pictures are drawn for few (they take a second each)."""
    work = fresh(seeds)
    draw.choice((change_run_json, change_rank_file))(draw, seeds, work)
    return ["report" if draw.random() < 0.02 else "page", str(work)]


def target_predict(draw, seeds):
    work = fresh(seeds)
    draw.choice((change_run_json, change_rank_file))(draw, seeds, work)
    return ["predict", str(work), "--dp", draw.choice(("4", "2,8", "1000")), *WIDE]


def target_compare(draw, seeds):
    work = fresh(seeds)
    draw.choice((change_run_json, change_rank_file))(draw, seeds, work)
    pair = [str(work), str(seeds.copy)]
    draw.shuffle(pair)
    return ["compare", *pair, *draw.choice(([], ["--anyway"], ["--anyway", "--json"]))]


def target_merge(draw, seeds):
    """Parts of nodes."""
    parts = [fresh(seeds, "part0"), fresh(seeds, "part1")]
    (parts[0] / "rank-00001.arrows").unlink()
    (parts[1] / "rank-00000.arrows").unlink()
    changed = draw.randrange(2)
    if draw.random() < 0.5:
        change_run_json(draw, seeds, parts[changed])
    else:
        path = parts[changed] / f"rank-{changed:05d}.arrows"
        path.write_bytes(mutate_bytes(draw, path.read_bytes()))
    out = seeds.home / "joined"
    shutil.rmtree(out, ignore_errors=True)
    return ["merge", *map(str, parts), "--out", str(out)]


def target_summary(draw, seeds):
    """summary.json, which compares of figures may read back."""
    work = fresh(seeds)
    path = work / "summary.json"
    if draw.random() < 0.7:
        value = mutate_json(draw, json.loads(path.read_text()))
        path.write_bytes(dumps(value).encode(errors="surrogatepass"))
    else:
        path.write_bytes(mutate_bytes(draw, path.read_bytes()))
    return ["summary", str(work)]


def target_trace(draw, seeds):
    """Traces, plain and packed."""
    path = seeds.home / draw.choice(("rank0.json", "rank0.json.gz", "trace.json"))
    for old in ("rank0.json", "rank0.json.gz", "trace.json"):
        (seeds.home / old).unlink(missing_ok=True)
    how, data = draw.random(), seeds.trace
    if how < 0.5:
        value = json.loads(seeds.small.text(as_list=draw.random() < 0.2))
        data = dumps(mutate_json(draw, value)).encode(errors="surrogatepass")
    elif how < 0.9:
        data = mutate_bytes(draw, data, (b"", data[:5000]))
    if path.suffix == ".gz":
        data = gzip.compress(data, 1)
        if draw.random() < 0.3:
            data = mutate_bytes(draw, data, (b"", data))
        if draw.random() < 0.03:
            data = bomb(draw)
    path.write_bytes(data)
    options = draw.choice(([], ["--lenient"], ["--json"], ["--rank", "0"], ["--lenient", "--json"]))
    if draw.random() < 0.1:
        timeline = seeds.home / "timeline.json.gz"
        timeline.unlink(missing_ok=True)
        options = [*options, "--timeline", str(timeline)]
    return ["trace", str(path), *options, "--max-unpacked-gb", "0.004"]


def target_traces(draw, seeds):
    """Traces of several ranks of which one is changed."""
    folder = seeds.home / "ranks"
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(seeds.traces, folder)
    path = draw.choice(sorted(folder.iterdir()))
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    if draw.random() < 0.6:
        raw = dumps(mutate_json(draw, json.loads(raw))).encode(errors="surrogatepass")
    else:
        raw = mutate_bytes(draw, raw)
    path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)
    return ["trace", str(folder), "--jobs", "1", *draw.choice(([], ["--lenient"], ["--json"]))]


def target_captured(draw, seeds):
    """A run with traces of torch.profiler, of which something is changed."""
    work = fresh(seeds)
    how = draw.randrange(3)
    if how == 0:
        change_run_json(draw, seeds, work)
    elif how == 1:
        change_rank_file(draw, seeds, work)
    else:
        path = draw.choice(sorted(work.glob("kineto/*/*.json.gz")))
        raw = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(mutate_bytes(draw, raw), 1))
    return ["trace", str(work), "--jobs", "1"]


def target_odd_files(draw, seeds):
    """Folders, pipes, devices, links and holes where files are expected."""
    work = fresh(seeds)
    names = ["run.json", "rank-00000.arrows", "rank-00001.arrows", "summary.json"]
    names += ["kineto", "kineto/dp2/rank-00000.json.gz", "report.html", "rank-99999999.arrows"]
    for _ in range(draw.choice((1, 1, 2))):
        path = work / draw.choice(names)
        if path.parent.is_dir():
            put_odd_file(draw, path)
    return [
        *draw.choice(
            (
                ["analyze"],
                ["page"],
                ["summary"],
                ["trace", "--jobs", "1"],
                ["predict", "--dp", "4", *WIDE],
            )
        ),
        str(work),
    ]


TARGETS = {
    "run.json": (target_analyze, 3),
    "spans": (target_spans, 4),
    "condensed": (target_condensed, 3),
    "page": (target_page, 2),
    "predict": (target_predict, 1),
    "compare": (target_compare, 1),
    "merge": (target_merge, 1),
    "summary.json": (target_summary, 1),
    "trace": (target_trace, 4),
    "traces": (target_traces, 1),
    "captured": (target_captured, 1),
    "odd files": (target_odd_files, 1),
}
"""What is read, with its maker and how often it is drawn."""


# --------------------------------------------------------------------------------------------
# The judge


def call(arguments):
    """Calls a command as the command line does, errors beneath its last net.

    Returns:
        Exit code, stdout, stderr.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if arguments[0] == "page":
                _page(Path(arguments[1]))
            elif arguments[0] == "tables":
                _tables(Path(arguments[1]))
            elif arguments[0] == "summary":
                reader.read_summary(Path(arguments[1]))
            else:
                main(["--debug", *arguments])
        except SystemExit as end:
            return end.code or 0, out.getvalue(), err.getvalue()
        except DdpProfilerError as error:
            return error.exit_code, out.getvalue(), err.getvalue() + error_text(error)
    return 0, out.getvalue(), err.getvalue()


def _page(folder):
    from ddp_profiler.load import load_report
    from ddp_profiler.report.page import render

    found = load_report(folder)
    print(render.render(found.summary, found.details, found.outlook))


def _tables(folder):
    import ddp_profiler

    run = ddp_profiler.load_run(folder)
    for table in (run.collectives, run.buckets, run.steps, run.ranks, run.rank_heat_map):
        table()


def judge(arguments, code, out, err, warned=()):
    """Says what is wrong with what came out; empty where nothing is."""
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    if "Traceback" in out + err:
        return "a stack trace"
    if code and len(err.strip().splitlines()) > 2:
        return f"an error of {len(err.strip().splitlines())} lines"
    if len(err) > 4000:
        return f"an error of {len(err)} characters"
    if code and not err.strip():
        return "no word of what is wrong"
    shown = err if arguments[0] == "page" else out + err
    bad = sorted({c for c in shown if not c.isprintable() and c != "\n"})
    if bad:
        return f"unprintable characters {bad!r}"
    if arguments[0] == "page" and "<script" in out:
        return "a script in the page"
    if "--json" in arguments and code == 0:
        json.loads(out, parse_constant=lambda name: _refuse(name))
    if warned:
        return f"a warning of a library: {warned[0]}"
    return ""


def _refuse(name):
    raise ValueError(f"{name} in JSON")


class TooLongError(BaseException):
    """An input took too long."""


def _too_long(*_):
    raise TooLongError


def _peak_bytes(reset=False):
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmHWM"]) << 10, int(found["VmRSS"]) << 10


@dataclass
class Tally:
    """What a batch of inputs has shown."""

    inputs: Counter = field(default_factory=Counter)
    codes: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""
    most_bytes: int = 0
    most: str = ""


def try_input(target, seed, seeds, tally):
    """Makes one input and judges what comes of it."""
    name = f"{target}:{seed}"
    draw = random.Random(name)
    arguments = TARGETS[target][0](draw, seeds)
    _, before = _peak_bytes(reset=True)
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)
    problem = ""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            code, out, err = call(arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        told = [f"{one.category.__name__}: {one.message}" for one in caught
                if issubclass(one.category, (RuntimeWarning, UserWarning))]  # fmt: skip
        tally.codes[f"{code}"] += 1
        problem = judge(arguments, code, out, err, told)
    except TooLongError:
        problem = f"a hang: {LIMIT_S:g} s"
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = _where(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    took = time.monotonic() - started
    more = _peak_bytes()[0] - before
    if more > LIMIT_BYTES and not problem:
        problem = f"{more >> 20} MB"
    tally.inputs[target] += 1
    if took > tally.slowest_s:
        tally.slowest_s, tally.slowest = took, name
    if more > tally.most_bytes:
        tally.most_bytes, tally.most = more, name
    if problem:
        tally.failures.append((name, " ".join(arguments[:1]), problem))


def _where(error):
    import traceback

    frames = [f for f in traceback.extract_tb(error.__traceback__) if "ddp_profiler" in f.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename.rpartition('ddp_profiler/')[2]}:{last.lineno}"
    return f"{type(error).__name__} at {place}: {(str(error).splitlines() or [''])[0][:160]}"


def run_batch(home, count, first=0, targets=tuple(TARGETS)):
    """Tries so many inputs, shared out over the targets by their weight."""
    # What is asked for in one piece beyond this fails at once, and must be a word of ours.
    _, held = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), held))
    signal.signal(signal.SIGALRM, _too_long)
    seeds, tally = Seeds(home), Tally()
    turns = [name for name in targets for _ in range(TARGETS[name][1])]
    random.Random(7).shuffle(turns)
    for number in range(first, first + count):
        try_input(turns[number % len(turns)], number, seeds, tally)
    return tally


def report(tally):
    """The figures of a batch as JSON."""
    return json.dumps(
        {
            "inputs": dict(tally.inputs),
            "exit_codes": dict(tally.codes),
            "slowest_s": round(tally.slowest_s, 2),
            "slowest": tally.slowest,
            "most_mb": round(tally.most_bytes / 2**20, 1),
            "most": tally.most,
            "failures": tally.failures,
        }
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        chosen = tuple(sys.argv[3:]) or tuple(TARGETS)
        if ":" in chosen[0]:
            # One input again, with its stack trace.
            target, _, seed = chosen[0].partition(":")
            arguments = TARGETS[target][0](random.Random(chosen[0]), Seeds(Path(folder)))
            print(arguments, *call(arguments), sep="\n")
            sys.exit()
        done = run_batch(Path(folder), int(sys.argv[1]), int(sys.argv[2]), chosen)
    print(report(done))
