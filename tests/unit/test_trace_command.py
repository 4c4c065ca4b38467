"""``ddp-profiler trace``: the table, the JSON of the contract, exit codes, progress."""

import gzip
import io
import json
import math
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from ddp_profiler import cli
from ddp_profiler.report import progress as progress_module
from ddp_profiler.report import traces
from ddp_profiler.report.exact import pieces, us
from ddp_profiler.report.progress import ReadingProgress
from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.gather import read_ranks

from .kineto import ALL_REDUCE, Recording, training
from .traced_job import make_job


def call(capfd, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", *map(str, arguments)])
    out, err = capfd.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def folder(tmp_path):
    for rank in range(2):
        made, _ = training(rank, rank=rank)
        made.write(tmp_path / f"{rank}.json")
    return tmp_path


PARTS = (
    "window_us",
    "compute_us",
    "comm_us",
    "overlap_us",
    "exposed_comm_us",
    "memory_us",
    "idle_us",
    "overlap_fraction",
)


def test_json_has_the_keys_of_the_contract(folder, capfd):
    code, out, err = call(capfd, folder, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["world_size"] == 2
        for parts in (*rank["steps"], rank["total"]):
            assert set(PARTS) <= set(parts)
            assert parts["window_us"] == pytest.approx(
                parts["compute_us"]
                + parts["exposed_comm_us"]
                + parts["exposed_memory_us"]
                + parts["idle_us"]
            )
        assert [step["step"] for step in rank["steps"]] == [0, 1, 2]
    # Their times are random, so nothing ties their clocks.
    assert {warning["code"] for warning in found["warnings"]} == {"across_ranks_refused"}
    assert len(found["collectives"]) == 9
    assert found["collectives"][0]["kind"] == "AllReduce"
    assert set(found["collectives"][0]["begin_us_by_rank"]) == {"0", "1"}
    assert found["clock_offsets_us"] is None


def test_times_are_exact_in_json(tmp_path, capfd):
    made = Recording(origin_ns=1_700_000_000_123_456_789)
    made.comm(0, 1, ALL_REDUCE, **{"In msg nelems": 3, "Out msg nelems": 3, "dtype": "Float"})
    made.write(tmp_path / "t.json")
    _, out, _ = call(capfd, tmp_path, "--json")
    # A double knows this time to a quarter of a us only.
    (collective,) = json.loads(out, parse_float=Decimal)["collectives"]
    assert collective == {
        "kind": "AllReduce",
        "index": 0,
        "elements": 3,
        "dtype": "Float",
        "bytes": 12,
        "group": None,
        "group_size": 2,
        "stream": 20,
        "step": None,
        "step_occurrence": None,
        "begin_us": Decimal("1700000000123456.789"),
        "begin_us_by_rank": {"0": Decimal("1700000000123456.789")},
        "transfer_us": None,
        "wait_us_by_rank": None,
        "last_rank": None,
        "lag_us": None,
        "last_is_clear": None,
        "matched": False,
        "duration_us_by_rank": {"0": Decimal("0.001")},
        "busbw_gb_per_s": None,
        "own_busbw_gb_per_s": Decimal("12.0"),
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from proc")
def test_json_of_many_collectives_needs_little_memory(tmp_path):
    path = tmp_path / "rank0.json"
    row = (
        '{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)","pid":0,'
        '"tid":7,"ts":%d,"dur":5,"args":{"stream":7,"device":0,"correlation":%d}}'
    )
    number = 160_000
    with path.open("w") as file:
        file.write('{"distributedInfo":{"backend":"nccl","rank":0,"world_size":2},"traceEvents":[')
        file.writelines(
            ("," if place else "") + row % (1_700_000_000_000_000 + place * 10, place + 1)
            for place in range(number)
        )
        file.write("]}")
    code = (
        "import re, sys\n"
        "from ddp_profiler import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "status = open('/proc/self/status').read()\n"
        "sys.stderr.write(re.search(r'VmHWM:\\s*(\\d+) kB', status)[1])\n"
    )
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code, "trace", str(path), "--json"],
            stdout=out,
            stderr=subprocess.PIPE,
            check=True,
        )
    assert int(done.stderr.split()[-1]) < 250 * 1024
    with (tmp_path / "out").open() as out:
        assert sum('"begin_us_by_rank"' in line for line in out) == number


def test_pieces_are_the_json_of_the_whole():
    value = {
        "a": iter([{"b": us(-1_234), "c": (x for x in [1, 2])}, {"b": us(0), "c": iter([])}]),
        "d": [us(0.5), None, float("nan"), "\udcff\u00e9"],
        "e": {},
    }
    assert json.loads("".join(pieces(value))) == {
        "a": [{"b": -1.234, "c": [1, 2]}, {"b": 0, "c": []}],
        "d": [0.0005, None, None, "\udcff\u00e9"],
        "e": {},
    }
    parts = list(pieces({"many": ("x" * 100 for _ in range(10_000))}))
    assert 10 < len(parts) < 20


def test_what_does_not_apply_is_null(tmp_path, capfd):
    made = Recording(world_size=1)
    made.kernel(0, 100)
    made.event("cpu_op", "c10d::allreduce_", 0, 5)
    made.write(tmp_path / "t.json")
    _, out, _ = call(capfd, tmp_path, "--json")
    total = json.loads(out)["ranks"][0]["total"]
    assert total["comm_us"] is None
    assert total["overlap_fraction"] is None
    assert not any(isinstance(v, float) and math.isnan(v) for v in total.values())
    _, table, _ = call(capfd, tmp_path)
    assert "single_process" in table


def test_the_table_reads_well(folder, capfd):
    code, out, err = call(capfd, folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Ranks 0, 1 of 2, nccl; steps from ProfilerStep; times in ms."
    header = next(line for line in lines if "compute" in line)
    for column in ("rank", "step", "window", "overlap", "idle"):
        assert column in header
    found = read_ranks([folder])
    first = next(line for line in lines if line.split()[:2] == ["0", "0"]).split()
    parts = found.ranks[0].steps[0].parts
    assert float(first[2]) == pytest.approx(parts.window_ns / 1e6, abs=0.005)
    assert f"{parts.overlap_fraction * 100:.0f}%" in first
    assert sum(line.split()[:2] in (["0", "AllReduce"], ["1", "AllReduce"]) for line in lines) == 2


def test_the_timeline_is_written_and_told(tmp_path, capfd):
    folder = make_job(1, offsets={1: 3_000_000}).write(tmp_path / "job")
    path = tmp_path / "all.json.gz"
    code, out, err = call(capfd, folder, "--timeline", path)
    assert (code, err) == (0, "")
    assert "Timeline: " in out
    assert "Across ranks: 9 collectives matched." in out
    with gzip.open(path) as opened:
        assert len({event["pid"] for event in json.load(opened)["traceEvents"]}) == 4
    # It is not overwritten, and that is said before anything is read.
    code, out, err = call(capfd, folder, "--timeline", path)
    assert (code, out) == (2, "")
    assert "exists; it is not overwritten" in err
    code, out, _ = call(capfd, folder, "--json", "--timeline", tmp_path / "b.json")
    found = json.loads(out)
    assert code == 0
    assert found["timeline"]["file"].endswith("b.json")
    assert found["clock_offsets_us"]["1"] == 3000
    assert found["findings"]


def test_communication_on_the_cpu_beside_a_gpu(tmp_path):
    made = Recording(backend="gloo")
    made.step(0, 0, 1000)
    made.kernel(100, 300, launched=50)
    made.event("cpu_op", "gloo:all_reduce", 300, 200, tid=9)
    made.write(tmp_path / "t.json")
    found = read_ranks([tmp_path])
    text = traces.render(found, analyse(found)).replace("\n", " ")
    assert (found.ranks[0].total.overlap_ns, found.ranks[0].total.idle_ns) == (100, 600)
    assert "is not in the trace" not in text
    assert "overlap is with the GPU's kernels" in text
    assert "do nothing, and no collective runs on the CPU, for 60" in " ".join(text.split())
    made.events = [event for event in made.events if event["cat"] != "kernel"]
    made.write(tmp_path / "t.json")
    assert "is not in the trace" in traces.render(read_ranks([tmp_path]))


def test_many_ranks_are_not_all_shown(tmp_path):
    for rank in range(35):
        made = Recording(rank=rank, world_size=35)
        made.comm(0, 100)
        made.write(tmp_path / f"{rank}.json")
    text = traces.render(read_ranks([tmp_path]))
    assert "(3 more ranks are not shown here and below; --json has all)" in text
    ranks = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert "31" in ranks
    assert "32" not in ranks


def test_many_steps_are_not_all_shown(tmp_path):
    made, _ = training(1, steps=30)
    made.write(tmp_path / "t.json")
    text = traces.render(read_ranks([tmp_path]))
    shown = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert [name for name in shown if name in {"0", "3", "...", "28", "29"}] == [
        "0", "3", "...", "28", "29",
    ]  # fmt: skip


def test_long_names_stay_within_the_width(tmp_path):
    made = Recording()
    group = {"Process Group Name": "group " * 40, "Process Group Description": "\x1b[31mred"}
    made.comm(0, 10**13, ALL_REDUCE, **{**group, "In msg nelems": 10**15, "Out msg nelems": 1})
    made.write(tmp_path / "t.json")
    text = traces.render(read_ranks([tmp_path]))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_unusable_input_exits_with_3(tmp_path, capfd):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"name": "a" b"}, {"name": "c"}]}')
    code, out, err = call(capfd, path)
    assert (code, out) == (3, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"ddp-profiler: {path} is no JSON at byte 28: a quote")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--rank", "-1", "x"],
        ["--jobs", "0", "x"],
        ["--max-unpacked-gb", "0", "x"],
        ["--max-unpacked-gb", "nan", "x"],
        ["--max-unpacked-gb", "inf", "x"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capfd):
    code, out, err = call(capfd, *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_a_rank_for_two_files_exits_with_2(folder, capfd):
    code, _, err = call(capfd, folder, "--rank", "0")
    assert code == 2
    assert "there are 2" in err


def test_lenient_and_limits_reach_the_reader(tmp_path, capfd):
    made, _ = training(1)
    path = made.write(tmp_path / "t.json.gz")
    code, _, err = call(capfd, path, "--max-unpacked-gb", "0.000001")
    assert (code, "more than 1,000 bytes" in err) == (3, True)
    path.write_bytes(path.read_bytes()[:-300])
    assert call(capfd, path)[0] == 3
    code, out, _ = call(capfd, path, "--lenient", "--json")
    assert code == 0
    assert "repaired_cut" in {warning["code"] for warning in json.loads(out)["warnings"]}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_interrupted_while_others_read(tmp_path):
    paths = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for path in paths:
        os.mkfifo(path)
    code = (
        "import sys\n"
        "from ddp_profiler import cli\n"
        "from ddp_profiler.trace import gather\n"
        "gather._PARALLEL_FROM_BYTES = 0\n"
        "cli.main(sys.argv[1:])\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", code, "trace", *map(str, paths), "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # Opening waits until the process that reads has got there.
    writers = [path.open("wb", buffering=0) for path in paths]
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    for writer in writers:
        writer.close()
    assert (running.returncode, out) == (130, "")
    assert "Traceback" not in err


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def test_progress_is_quiet_at_first_and_tells_now_and_then(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    stream = io.StringIO()
    with ReadingProgress(stream) as progress:
        for second in range(31):
            clock.now = float(second)
            progress.tell(second * 1_000_000, 40_000_000)
    assert stream.getvalue().splitlines() == [
        "reading: 25% of 40 MB",
        "reading: 50% of 40 MB",
        "reading: 75% of 40 MB",
    ]


def test_progress_without_stderr_says_nothing():
    with ReadingProgress(None) as progress:
        progress.tell(1, 2)


def test_a_trace_of_one_rank_loads_nothing_that_it_does_not_need(folder):
    code = (
        "import sys; from ddp_profiler import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('loaded', *(m for m in ('scipy', 'pyarrow', 'numpy.ma', 'torch', 'matplotlib')"
        " if m in sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "trace", str(folder / "0.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "Rank 0" in done.stdout
    assert done.stderr.strip() == "loaded"
