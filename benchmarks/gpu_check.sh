#!/bin/sh
# Checks the profiler on this machine's NVIDIA GPUs in under five minutes; see docs/gpu.md.
# PYTHON names the Python that has torch; everything else is passed on (--help lists it).
set -eu
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "gpu_check: $python is no Python 3.11 or later; PYTHON=/path/to/python names one" >&2
    exit 2
}
exec "$python" "$(dirname "$(readlink -f "$0")")/gpu_check.py" "$@"
