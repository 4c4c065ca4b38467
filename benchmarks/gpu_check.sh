#!/bin/sh
# Checks the profiler on this machine's NVIDIA GPUs in under five minutes; see docs/gpu.md.
# PYTHON names the Python that has torch; everything else is passed on (--help lists it).
set -eu
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
