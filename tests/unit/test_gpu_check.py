"""benchmarks/gpu_check.py: bounds, table, file and time, and marks among recorded kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddp_profiler.analysis.data_sheets import find_sheet
from ddp_profiler.schema import (
    CopyRate,
    DevicePeaks,
    MicroBatchSearch,
    MicroBatchTrial,
    TrialOutcome,
)
from tests.integration.conftest import load_benchmark, run_command
from tests.unit.span_columns import Spans

gpu_check = load_benchmark("gpu_check")
parts = load_benchmark("gpu_check_parts")
SCRIPT = Path(gpu_check.__file__)
Row = gpu_check.Row


@pytest.mark.parametrize(
    ("low", "high", "figure", "verdict", "bound"),
    [
        (-2, 2, 1.9, "ok", "within 2"),
        (-2, 2, 2.1, "MISSED", "within 2"),
        (-2, 2, -2.1, "MISSED", "within 2"),
        (0.5, 1.05, 0.49, "MISSED", "0.5 to 1.05"),
        (None, 1, 1.0, "ok", "at most 1"),
        (1, None, 0, "MISSED", "at least 1"),
        (-2, 2, float("nan"), "MISSED", "within 2"),
        (None, None, 3.0, "shown", ""),
        (None, 1, None, "not run", "at most 1"),
    ],
)
def test_verdicts(low, high, figure, verdict, bound):
    row = Row("c", "w", figure, "%", low, high)
    assert (row.verdict, row.bound) == (verdict, bound)
    assert Row("c", "w", figure, "%", low, high, failed=True).verdict == "FAILED"


def test_exit_codes():
    ok, missed = Row("c", "w", 1.0, high=2), Row("c", "w", 3.0, high=2)
    left_out, failed = Row("c", "w", None), Row("c", "w", None, failed=True)
    assert gpu_check.exit_code([ok, left_out], rehearsal=False) == 0
    assert gpu_check.exit_code([ok, missed], rehearsal=False) == 1
    assert gpu_check.exit_code([ok, failed], rehearsal=False) == 1
    assert gpu_check.exit_code([left_out], rehearsal=False) == 1
    # On a CPU figures say nothing, but what does not run is a fault of the program.
    assert gpu_check.exit_code([ok, missed], rehearsal=True) == 0
    assert gpu_check.exit_code([ok, failed], rehearsal=True) == 1


def test_the_time_for_all_is_kept():
    """A check gets what is left, less what ending it may take; the rest is named."""
    now, given = [0.0], {}

    def start(check, limit_s):
        given[check.name] = limit_s
        now[0] += limit_s
        return [Row(check.name, "w", 1.0)]

    checks = [gpu_check.Check(name, 40, "text") for name in "abc"]
    rows, took = gpu_check.run_checks(checks, start, 80.0, lambda: now[0])
    assert given == {"a": 40, "b": 32}
    assert took == {"a": 40, "b": 32}
    assert [(row.check, row.verdict) for row in rows[2:]] == [("c", "FAILED")]
    assert rows[2].note == "no time left"
    assert sum(took.values()) <= 80


_TOLD_TO_END = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("it ends its ranks", flush=True), sys.exit()))
time.sleep(60)
"""
"""As torchrun: were it killed at once, its ranks would stay."""


@pytest.mark.parametrize(
    ("code", "limit_s", "words"),
    [
        ("print('fine')", 20, ""),
        ("print('why'); raise SystemExit(3)", 20, "ended with 3: why"),
        (_TOLD_TO_END, 1.0, "did not end within 1 s: it ends its ranks"),
    ],
)
def test_a_check_ends_in_time_and_says_why(tmp_path, code, limit_s, words):
    problem = gpu_check.run_one([sys.executable, "-c", code], limit_s, tmp_path / "log")
    assert problem.startswith(words)
    assert bool(problem) == bool(words)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"what": "w"}]', '[{"nothing": 1}]'])
def test_what_a_check_wrote_is_read_or_refused(text):
    with pytest.raises(ValueError, match=r"\S"):
        gpu_check.read_rows("c", text)


def test_rows_of_the_parts_are_rows_of_the_table():
    written = json.dumps([parts.row("w", 1.5, "%", high=2.0), parts.row("v", None, note="why")])
    rows = gpu_check.read_rows("c", written)
    assert [(row.check, row.verdict) for row in rows] == [("c", "ok"), ("c", "not run")]


def test_every_check_has_its_part():
    assert {check.name for check in gpu_check.CHECKS} == set(parts.CHECKS)


def test_a_table_is_made_from_a_file(tmp_path, capsys, monkeypatch):
    file = tmp_path / "figures.json"
    rows = [Row("parts", "forward", 0.4, "%", -2, 2, "note"), Row("nccl", "w", None, note="1 GPU")]
    raw = {
        **gpu_check.head(gpu_check.FORMAT_VERSION, 0.5),
        "device": "cuda",
        "torch": "2.11.0",
        "cuda": "12.8",
        "nccl": "2.28.9",
        "gpus": ["NVIDIA H200", "NVIDIA H200"],
        "rows": [gpu_check.asdict(row) for row in rows],
        "took_s": {"parts": 20.5},
    }
    file.write_text(json.dumps(raw))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--read", str(file)])
    assert gpu_check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 x NVIDIA H200; torch 2.11.0, CUDA 12.8, NCCL 2.28.9" in lines[1]
    assert lines[4].split() == ["parts", "forward", "0.4", "%", "within", "2", "ok", "note"]
    assert lines[-2] == "1 ok, 1 not run"


@pytest.mark.parametrize(("file", "words"), [("", "is a folder"), ("no/f.json", "not exist")])
def test_a_file_that_cannot_be_written_is_refused_before_minutes_are_spent(
    file, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gpu_check, "probe", lambda: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--json", str(tmp_path / file)])
    with pytest.raises(SystemExit) as raised:
        gpu_check.main()
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_without_a_gpu_one_line_and_code_2(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "probe", lambda: {"torch": "2.13.0+cpu", "gpus": []})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "sees no NVIDIA GPU" in err


def test_what_is_missing_is_named():
    command = [sys.executable, "-c", 'print(\'{"missing": ["torch", "msgspec"]}\')']
    assert "pip install torch msgspec" in gpu_check.probe(command)["problem"]
    assert "ended" in gpu_check.probe([sys.executable, "-c", "raise SystemExit(1)"])["problem"]


def test_the_shell_script_passes_its_words_on():
    done = run_command(
        [
            "-c",
            "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))",
            SCRIPT.with_suffix(".sh"),
            "--help",
        ],
        env={"PYTHON": sys.executable},
    )
    assert done.code == 0
    assert "--device" in done.out


def test_a_python_that_lacks_what_the_program_itself_needs_gets_one_line():
    """As a bare machine has it: not even numpy."""
    code = (
        "import runpy, sys; sys.modules['numpy'] = None; sys.path.insert(0, sys.argv[1]); "
        "runpy.run_path(sys.argv[2])"
    )
    done = run_command(["-c", code, SCRIPT.parent, SCRIPT])
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert "lacks numpy" in done.err
    assert str(SCRIPT.parents[1]) in done.err


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_the_shell_script_refuses_what_is_no_python(python):
    done = subprocess.run(
        [SCRIPT.with_suffix(".sh")],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert f"gpu_check: {python} is no Python 3.11 or later" in last


class Trace:
    """Events of a trace: launches on the host and what they start on the device, in us."""

    def __init__(self):
        self.events = []

    def work(self, launched, begin, end, *, stream=7, name="gemm", cat="kernel"):
        number = len(self.events)
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1}
        self.events.append(launch | {"args": {"correlation": number}})
        run = {"cat": cat, "name": name, "ts": begin, "dur": end - begin}
        self.events.append(run | {"args": {"correlation": number, "stream": stream}})

    def mark(self, number, at, stream="main"):
        name = f"{parts.MARK}{number} {stream}"
        self.events.append({"cat": "user_annotation", "name": name, "ts": at, "dur": 2})
        self.events.append({"cat": "gpu_user_annotation", "name": name, "ts": 5e6, "dur": 2})


def test_a_mark_lies_at_the_end_of_what_was_launched_before_it():
    trace = Trace()
    trace.mark(0, 1)
    trace.work(10, 100, 1100)
    trace.mark(1, 15)
    trace.work(20, 1100, 3100)
    trace.work(25, 3100, 3200, cat="gpu_memcpy", name="Memcpy HtoD")
    trace.mark(2, 30)
    trace.work(40, 3200, 9000, stream=20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    trace.mark(3, 45)
    trace.mark(4, 46, "side")
    # Another stream computes little, and holds no mark up.
    trace.work(50, 3200, 20000.5, stream=9, name="gemm")
    trace.mark(6, 52)
    trace.work(55, 9000, 29000)
    trace.mark(5, 60)
    assert parts.place_marks(trace.events) == {
        1: 1_100_000,
        2: 3_200_000,
        3: 3_200_000,
        4: 9_000_000,
        5: 29_000_000,
        6: 3_200_000,
    }


def test_collectives_on_two_streams_are_all_waited_for():
    trace = Trace()
    trace.work(5, 50, 60)
    trace.work(10, 100, 9000, stream=20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    trace.work(20, 110, 1100, stream=21, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    trace.mark(0, 30, "side")
    # The stream that computes is not the busiest one, where communication takes longer.
    trace.mark(1, 31)
    assert parts.place_marks(trace.events) == {0: 9_000_000, 1: 60_000}


def test_a_rank_alone_has_no_collectives_to_wait_for():
    trace = Trace()
    trace.work(10, 100, 1100)
    trace.mark(0, 15, "side")
    assert parts.place_marks(trace.events) == {0: 1_100_000}


def test_a_trace_without_kernels_places_no_mark():
    trace = Trace()
    trace.mark(0, 1)
    assert parts.place_marks(trace.events) == {}
    assert parts.place_marks([]) == {}


def step_spans(numbers):
    """Two steps whose times are numbers of marks, as the check has them."""
    spans = Spans()
    for step in range(2):
        first = 7 * step
        b = [n / 1e6 for n in range(first, first + 9)]
        spans.step(b[0], b[7], step=step).data(b[0], b[1], step=step)
        spans.forward(b[1], b[2], step=step).backward(b[2], b[4], b[6], step=step)
        spans.gradient(b[3], b[5], step=step).optimizer(b[6], b[7], step=step)
    assert numbers == 15
    return spans.columns()


def test_parts_of_two_opinions_are_compared():
    """Theirs puts one mark, the end of forward, 1 ms later: forward longer, backward shorter."""
    lengths = [1, 10, 8, 8, 2, 1, 3]
    at = np.cumsum([0, *lengths, *lengths]) * 1_000_000
    ours = dict(enumerate(at.tolist()))
    theirs = {**ours, 9: ours[9] + 1_000_000}
    found = parts.compare_parts(step_spans(15), ours, theirs, 2)
    assert found["forward"] == pytest.approx((10, 11))
    assert found["backward"] == pytest.approx((16, 15))
    assert found["exposed_transfer"] == pytest.approx((2, 2))
    assert found["optimizer"] == pytest.approx((3, 3))
    assert found["in flight"] == pytest.approx((10, 10))
    assert found["step"] == pytest.approx((33, 33))
    off = {name: parts.difference_percent(*pair) for name, pair in found.items()}
    outside = {name for name, value in off.items() if abs(value) > parts.WITHIN_PERCENT}
    assert outside == {"forward", "backward"}


def test_marks_that_no_kernel_places_are_an_error():
    ours = {n: n * 1_000_000 for n in range(15)}
    with pytest.raises(RuntimeError, match="have no kernel before"):
        parts.compare_parts(step_spans(15), ours, {14: 1}, 2)


def trial(size, peak, outcome=TrialOutcome.FITS):
    return MicroBatchTrial(size, outcome, peak, None, (1_000,) if peak else ())


@pytest.mark.parametrize(
    ("peaks", "verdicts"),
    [
        ((10, 20, 40), ["ok", "ok", "ok"]),
        ((10, 30, 20), ["ok", "MISSED", "ok"]),
        ((10, 20, 200), ["ok", "ok", "MISSED"]),
        ((), ["MISSED", "not run"]),
    ],
)
def test_a_memory_curve(peaks, verdicts):
    trials = tuple(trial(2**i, peak) for i, peak in enumerate(peaks))
    search = MicroBatchSearch(2, "memory", 100, "GPU", "allocator", trials)
    rows = gpu_check.read_rows("memory", json.dumps(parts.rows_of_search(search)))
    assert [row.verdict for row in rows] == verdicts


@pytest.mark.parametrize(
    ("flops", "rate", "verdicts"),
    [
        (700e12, 4.0e12, ["ok", "ok"]),
        (300e12, 4.0e12, ["MISSED", "ok"]),
        (700e12, 9.0e12, ["ok", "MISSED"]),
    ],
)
def test_peaks_beside_the_data_sheet(flops, rate, verdicts):
    peaks = DevicePeaks(
        0, "NVIDIA H200", "cuda", "bf16", 141 * 10**9, 132, flops, (CopyRate(2**30, rate),), 2e-6
    )
    rows = parts.rows_of_peaks(peaks, find_sheet("NVIDIA H200").sheet)
    read = gpu_check.read_rows("peaks", json.dumps(rows))
    assert [row.verdict for row in read if row.bound] == verdicts
    assert not [r for r in parts.rows_of_peaks(peaks, None) if r.get("high")]


@pytest.mark.parametrize(
    ("mfu", "verdict"), [(0.4, "ok"), (1.2, "MISSED"), (1e-5, "MISSED"), (None, "not run")]
)
def test_a_share_of_peak_that_cannot_be_is_seen(mfu, verdict):
    level = SimpleNamespace(id="dp1", mfu=mfu)
    (found,) = gpu_check.read_rows("study", json.dumps(parts.rows_of_share(level, "bf16 peak")))
    assert found.verdict == verdict
    assert mfu is None or found.figure == pytest.approx(mfu * 100)


def test_weights_to_the_bit():
    one, two = ["weights 0 aa 1.0", "weights 1 aa 1.0"], ["weights 0 ab 1.0", "weights 1 ab 1.0"]

    def verdict(alone, again, observed):
        rows = parts.rows_of_weights(alone, again, observed, 2)
        return gpu_check.read_rows("script", json.dumps(rows))[0].verdict

    assert verdict(one, one, one) == "ok"
    assert verdict(one, one, two) == "MISSED"
    assert verdict(one, one, one[:1]) == "MISSED"
    # What is not reproducible by itself cannot accuse the profiler.
    assert verdict(one, two, one) == "not run"


def test_a_level_whose_parts_do_not_sum_is_seen():
    def rows(other, unexplained=False, observed=8):
        level = SimpleNamespace(
            id="dp2",
            breakdown_ms={"forward": 40.0, "exposed_wait": None, "other": other},
            instrumented_step_ms=SimpleNamespace(mean=40.1),
            step_ms=SimpleNamespace(mean=40.0),
            global_batch=8,
            batch_check=SimpleNamespace(
                observed=observed, gradient_unexplained=unexplained, gradient_max_rel_error=1e-7
            ),
        )
        found = gpu_check.read_rows("study", json.dumps(parts.rows_of_level(level)))
        return [row.verdict for row in found]

    assert rows(0.1) == ["ok", "ok", "ok", "ok", "shown"]
    assert rows(0.2)[0] == "MISSED"
    assert rows(0.9)[1] == "MISSED"
    assert rows(0.1, observed=4)[2] == "MISSED"
    assert rows(0.1, unexplained=True)[3] == "MISSED"


def test_what_is_no_number_has_failed():
    text = '[{"what": "w", "figure": NaN, "high": 2}, {"what": "w", "figure": 1.0, "high": 2}]'
    rows = gpu_check.read_rows("c", text)
    assert [row.verdict for row in rows] == ["FAILED", "ok"]
    assert (rows[0].figure, rows[0].note) == (None, "nan is no figure")
