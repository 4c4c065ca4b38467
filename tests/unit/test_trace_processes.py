"""Work in several processes: order, progress, and ends that come too early."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ddp_profiler.errors import InputError
from ddp_profiler.trace.processes import map_in_processes


def double(item, tell):
    tell(item)
    return 2 * item


def double_or_die(item, tell):
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def die_while_answering(item, tell):
    # Longer than a pipe holds, so that the death falls into the middle of a message.
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return Slow()


class Slow:
    """Takes its time when it is sent."""

    def __reduce__(self):
        time.sleep(60)
        return (Slow, ())


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_results_come_in_the_order_of_the_items(processes):
    told = []
    found = map_in_processes(
        double, [3, 1, 2], processes, lambda place, done: told.append((place, done))
    )
    assert found == [6, 2, 4]
    # Each process tells at once when it begins, and then not for a while.
    assert (0, 3) in told
    assert set(told) <= {(0, 3), (1, 1), (2, 2)}


def test_without_items_there_is_nothing_to_do():
    assert map_in_processes(double, [], 2, lambda *_: None) == []


@pytest.mark.parametrize("work", [double_or_die, die_while_answering])
def test_a_process_that_dies_is_an_error(work):
    with pytest.raises(InputError, match=r"signal 9.*\n?.*--jobs 1"):
        map_in_processes(work, [0, 1, 2, 3], 2, lambda *_: None)


INTERRUPTED = """
import sys, time
from ddp_profiler.trace.processes import map_in_processes

def sleep(item, tell):
    while True:
        time.sleep(0.1)
        tell(item)

if __name__ == "__main__":
    print("begins", flush=True)
    try:
        map_in_processes(sleep, [1, 2, 3], 3, lambda *_: None)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_an_interrupt_at_any_moment_ends_all(tmp_path, after_s):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    running = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout.readline() == "begins\n"
    time.sleep(after_s)
    os.killpg(running.pid, signal.SIGINT)
    # The pipes end with the last process that holds them.
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "interrupted\n", "")
