"""Two runs of each side of a comparison, in turns in one process, which spares launches."""

import sys
from pathlib import Path

from printed_train import main

import ddp_profiler

OUT = Path(sys.argv.pop())

for number in (1, 2):
    for side in ("base", "new"):
        with ddp_profiler.profile(out=OUT / f"{side}-{number}", show=False):
            main()
