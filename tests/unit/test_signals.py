"""Signals that ask a rank to end are heard, end it as they would, and leave nohup its meaning."""

import signal
import subprocess
import sys

import pytest

CODE = """
import signal, sys, time
from ddp_profiler.measure.signals import SignalWatch, end_by
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
def heard(number):
    print("heard", number.name, flush=True)
    end_by(number)
SignalWatch(heard, lambda: None).install()
print("ready", flush=True)
time.sleep(60)
"""


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGHUP, -1)]
)
def test_a_signal_is_heard_and_ends_the_process_as_it_would(number, code):
    with start() as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"heard {number.name}\n"
        assert process.wait(60) == code


def test_nohup_keeps_its_meaning():
    with start("nohup") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "heard SIGTERM\n"
        process.wait(60)
