"""A coverage-guided fuzzer over one reader: ``python -m tests.faults.guided TARGET SECONDS``.

Needs atheris, which is not among the test's requirements. It mutates bytes and keeps what reaches
new lines of ours. Whatever comes out but our own errors ends it with the input's file.
"""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ddp_profiler"]):
    from ddp_profiler.errors import DdpProfilerError
    from ddp_profiler.load import load_report
    from ddp_profiler.report import console, traces
    from ddp_profiler.trace import gather
    from ddp_profiler.trace.analysis import analyse

from tests.faults import hostile_inputs as hostile

HOME = Path(tempfile.mkdtemp(prefix="guided-"))
SEEDS = hostile.Seeds(HOME)
WORK = hostile.fresh(SEEDS)
TRACE = HOME / "rank0.json"


def run_json(data):
    (WORK / "run.json").write_bytes(data)
    console.render(load_report(WORK).summary, color=False)


def spans(data):
    path = WORK / "rank-00000.arrows"
    path.write_bytes(data)
    console.render(load_report(WORK).summary, color=False)


def trace(data):
    TRACE.write_bytes(data)
    found = gather.read_ranks([TRACE], lenient=len(data) % 2 == 0, limit_bytes=1 << 22)
    traces.render(found, analyse(found), None, color=False)


READ = {"run.json": run_json, "spans": spans, "trace": trace}
FIRST = {
    "run.json": lambda: (WORK / "run.json").read_bytes(),
    "spans": lambda: (WORK / "rank-00000.arrows").read_bytes(),
    "trace": lambda: SEEDS.small.text(),
}


def main():
    target, seconds = sys.argv[1:3]
    read = READ[target]

    def one(data):
        with contextlib.suppress(DdpProfilerError):
            read(data)

    corpus = HOME / "corpus"
    corpus.mkdir()
    (corpus / "sound").write_bytes(FIRST[target]())
    options = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=2048", "-max_len=200000"]
    # libFuzzer names its own findings; they stay where this was started.
    atheris.Setup([sys.argv[0], str(corpus), *options, "-print_final_stats=1"], one)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(HOME, ignore_errors=True)


if __name__ == "__main__":
    main()
