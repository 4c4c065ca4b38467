"""Runs all tests: first those that may run beside each other, then those that must be alone.

    python tests/in_two_parts.py JOBS [options of pytest]

Ends with the first exit code of pytest's that is neither 0 nor "no tests were selected"; with the
latter where neither part had any.
"""

import subprocess
import sys

DONE, FAILED, NONE = 0, 1, 5
"""Exit codes of pytest; after others, such as wrong usage and an interrupt, nothing follows."""


def verdict(codes):
    """Returns the exit code of both parts together.

    >>> verdict([0, 0]), verdict([0, 5]), verdict([5, 0]), verdict([5, 5])
    (0, 0, 0, 5)
    >>> verdict([1, 0]), verdict([0, 1]), verdict([5, 1]), verdict([2])
    (1, 1, 1, 2)
    """
    failed = [code for code in codes if code not in (DONE, NONE)]
    return failed[0] if failed else min(codes)


def main(jobs, *options):
    # A file goes to one process, for its fixtures' sake; in their order, since files with long
    # tests come first. Options that are given come last, so that they count: -n 0 --pdb.
    beside = ("--part", "beside", "-n", jobs, "--dist", "loadfile", "--no-loadscope-reorder")
    codes = []
    for part in (beside, ("--part", "alone")):
        codes.append(subprocess.call([sys.executable, "-m", "pytest", *part, *options]))
        if codes[-1] not in (DONE, FAILED, NONE):
            break
    return verdict(codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
