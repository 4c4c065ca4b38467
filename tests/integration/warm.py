"""Launches jobs as torchrun does, from a process that has imported torch once for all of them.

    python warm.py

A job is a line of JSON on stdin: ``ranks``, ``argv`` (what would follow ``python``), ``cwd``,
``env`` (changes; None removes), ``out`` and ``err`` (files), ``timeout`` in s. The answer is a line
with its exit code, null where it ran out of time.

Each rank is a fork of this process: importing torch, DDP and us takes a rank some 5 s of processor
time, more than all that most jobs do. Ranks have the environment that torchrun would give them,
with the launcher's store, and when one fails the others are ended, as by torchrun. What differs:
modules are imported already, and a rank's end does not tear the interpreter down. Tests of what
torchrun or a bare interpreter does start those themselves.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import matplotlib.backends.backend_agg  # noqa: F401 - once, before the forks, as all of these
import rich.console  # noqa: F401
import scipy.stats  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.optim

import ddp_profiler.conclusion
import ddp_profiler.report.plots
import ddp_profiler.run
import ddp_profiler.script  # noqa: F401

GRACE_S = 30.0
"""torchrun's, between asking ranks to end and killing them."""


def become(argv):
    """Does what ``python ARGV`` would."""
    # As the main module it is executed anew; what it needs is there.
    del sys.modules["ddp_profiler.run"]
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def run_rank(argv):
    """Runs a rank to its end and ends the process."""
    code = 0
    try:
        become(argv)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        gc.disable()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(code & 0xFF)


def rank_environment(rank, ranks, port):
    places = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks}
    elastic = {"RESTART_COUNT": 0, "MAX_RESTARTS": 0, "RUN_ID": "warm", "USE_AGENT_STORE": True}
    found = {**places, **sizes, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    found |= {"MASTER_PORT": port, "ROLE_NAME": "default"}
    found |= {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    return {name: str(value) for name, value in found.items()}


def start_rank(rank, ranks, argv):
    """Returns a rank's process and the end of a pipe from which it takes the store's port."""
    take, give = os.pipe()
    pid = os.fork()
    if pid:
        os.close(take)
        return pid, give
    os.close(give)
    port = os.read(take, 16).decode()
    os.close(take)
    if not port:
        os._exit(1)
    # torchrun sets it for several ranks only.
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    os.environ.update(rank_environment(rank, ranks, port))
    run_rank(argv)
    return None


def run_agent(ranks, argv):
    """Starts all ranks, keeps their store and returns the exit code of torchrun."""
    # The store has threads, so it comes after the forks.
    started = [start_rank(rank, ranks, argv) for rank in range(ranks)]
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    for _, give in started:
        os.write(give, str(store.port).encode())
        os.close(give)
    running, code = {pid for pid, _ in started}, 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not code:
            code = 1
            time.sleep(0.1)  # torchrun looks that often
            for other in running:
                os.kill(other, signal.SIGTERM)
            signal.signal(signal.SIGALRM, lambda *_: [os.kill(p, signal.SIGKILL) for p in running])
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    return code


def run_job(ranks, argv, cwd, env, out, err, timeout):
    """Returns a job's exit code; None where it ran out of time."""
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
                how = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
                file = os.open(path, how, 0o644)
                os.dup2(file, number)
                os.close(file)
            os.chdir(cwd)
            for name, value in env.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            os._exit(run_agent(ranks, argv))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pid = None
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
    finally:
        if pid:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    # Not frozen: with nothing counted as old, ranks would collect all of it again and again, and a
    # DDP that goes then may wait for gloo's threads while these wait for the interpreter lock.
    gc.collect()
    # What jobs print goes to their files; the answers keep the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        answers.write(json.dumps(run_job(**json.loads(line))) + "\n")
