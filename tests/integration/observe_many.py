"""Observes several scripts, one after the other, each as a run of its own with all its ranks.

    python observe_many.py RANKS FOLDER SCRIPT:ARG [SCRIPT:ARG ...]

Each rank is a fork of this process, so that importing torch is paid once, and has the environment
that torchrun would give it. What a run prints goes to FOLDER/SCRIPT-ARG.log, its run folder is
FOLDER/SCRIPT-ARG, and this process prints a line of its ranks' exit codes.
"""

import os
import socket
import sys
import traceback
from pathlib import Path

import torch.distributed.optim  # noqa: F401 - imported once, before the forks

import ddp_profiler.report.plots
import ddp_profiler.script  # noqa: F401 - the same
from ddp_profiler.run import main

SCRIPTS = Path(__file__).parent / "scripts" / "mistakes"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(rank, ranks, port, argv, log):
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in {**places, **address}.items()})
        with log.open("a", buffering=1) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv = argv
        code = main(argv[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def observe(ranks, folder, case):
    script, _, way = case.partition(":")
    name = f"{script}-{way}"
    ours = ["--steps", "4", "--warmup", "3", "--out", str(folder / name)]
    argv = ["ddp_profiler.run", *ours, str(SCRIPTS / f"{script}.py"), way]
    port = free_port()
    started = [start(r, ranks, port, argv, folder / f"{name}.log") for r in range(ranks)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]


if __name__ == "__main__":
    ranks, folder, cases = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    for case in cases:
        print(case, *observe(ranks, folder, case), flush=True)
