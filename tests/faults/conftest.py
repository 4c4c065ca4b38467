"""Launches in which something goes wrong, judged from outside by the benchmarks' own kit."""

from tests.integration.conftest import load_benchmark

faultkit = load_benchmark("faultkit")

MODEL = "timed:layers=4,parameters=20000,forward_ms=1,backward_ms=2"
STUDY = ("--dp", "2", "--steps", "10", "--warmup", "3", "--micro-batch", "4")
TIMEOUT_S = 5
LIMIT_S = 100
"""Only a hang takes that long: what ends in time is judged by the product's own bounds."""


def study(folder, *options, model=MODEL, **keywords):
    """Runs a study of two ranks that something is planted in."""
    ours = ("-m", "ddp_profiler.run", "--model", model, *STUDY, "--allreduce-max-mb", "0.1")
    words = (*ours, "--timeout", str(TIMEOUT_S), "--out", folder, *options)
    return faultkit.launch(words, folder, limit_s=LIMIT_S, **keywords)


def check_end(ended):
    """Checks what every lost run must hold to."""
    assert ended.code is not None, f"it hung:\n{ended.err[-3000:]}"
    assert ended.code != 0
    assert ended.left == []
    assert "Traceback" not in ended.ours


def check_kept(kept, *, partial=True):
    """Checks that all that was whole on disk is read and shown."""
    assert kept.readable == kept.on_disk
    assert kept.code == 0, kept.text
    assert kept.partial is partial
