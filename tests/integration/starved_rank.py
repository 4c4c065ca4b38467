"""The worker with a planted cause: one local rank may use one core, and three hogs run on it.

Usage: torchrun ... starved_rank.py [options of ddp_profiler.run]. STARVED_RANK is the local
rank, STARVED_CORE the core. A hog ends with its parent, and after a minute in any case.
"""

import importlib
import os
import runpy
import subprocess
import sys

HOG = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + 60
while os.getppid() == parent and time.monotonic() < end:
    sum(range(20_000))
"""

if __name__ == "__main__":
    if os.environ["LOCAL_RANK"] == os.environ["STARVED_RANK"]:
        importlib.import_module("torch")  # long with a quarter of a core
        os.sched_setaffinity(0, {int(os.environ["STARVED_CORE"])})
        own = str(os.getpid())
        hogs = [subprocess.Popen([sys.executable, "-c", HOG, own]) for _ in range(3)]
        try:
            runpy.run_module("ddp_profiler.run", run_name="__main__", alter_sys=True)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
    else:
        runpy.run_module("ddp_profiler.run", run_name="__main__", alter_sys=True)
