"""The worker inside a cgroup with a limit on processor time: a planted cause.

Usage: throttled_rank.py [options of ddp_profiler.run]. THROTTLED_BY is the cgroup's folder.
"""

import importlib
import os
import runpy
from pathlib import Path

if __name__ == "__main__":
    # Long with little processor time: before the limit holds.
    for heavy in ("torch", "scipy.stats", "pyarrow", "matplotlib.pyplot", "rich.console"):
        importlib.import_module(heavy)
    (Path(os.environ["THROTTLED_BY"]) / "cgroup.procs").write_text(str(os.getpid()))
    runpy.run_module("ddp_profiler.run", run_name="__main__", alter_sys=True)
