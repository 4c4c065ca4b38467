"""The worker in a cgroup whose limit on processor time holds while steps are measured.

Usage: throttled_rank.py [options of ddp_profiler.run]. THROTTLED_BY names the file of the limit,
LIMIT and UNLIMITED are what to write there. All else, such as the rates of the device, would only
take long with little processor time.
"""

import os
import runpy
from pathlib import Path

from ddp_profiler.measure.loop import LevelRun
from ddp_profiler.schema import Variant

run_block = LevelRun.run_block


def limited(self, steps, variant, *arguments):
    file = Path(os.environ["THROTTLED_BY"])
    if variant is not Variant.INSTRUMENTED:
        return run_block(self, steps, variant, *arguments)
    file.write_text(os.environ["LIMIT"])
    try:
        return run_block(self, steps, variant, *arguments)
    finally:
        file.write_text(os.environ["UNLIMITED"])


if __name__ == "__main__":
    folder = Path(os.environ["THROTTLED_BY"]).parent
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    LevelRun.run_block = limited
    runpy.run_module("ddp_profiler.run", run_name="__main__", alter_sys=True)
