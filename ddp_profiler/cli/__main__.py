"""Lets ``python -m ddp_profiler.cli`` stand for ``ddp-profiler``."""

from ddp_profiler.cli import main

main()
