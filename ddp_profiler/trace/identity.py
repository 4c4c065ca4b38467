"""Which rank a trace is of: said by the file or the user, never guessed."""

from __future__ import annotations

import re
from pathlib import Path

from ddp_profiler.errors import InputError

# "worker" as the profiler's trace handlers and many launchers name ranks. The step number in such
# names is none, and a range such as rank0-3 names several.
_RANK = re.compile(r"(?<![a-z])(?:rank|worker)[_\-=]?(\d+)(?![\d])(?!-\d)", re.IGNORECASE)
_SEVERAL = re.compile(r"(?<![a-z])ranks?[_\-=]?\d+-\d", re.IGNORECASE)
# The profiler names a file HOST_PID.TIME by itself, and hosts of a job are called worker-0 too,
# however many ranks each has.
_HOST = re.compile(r"(?<![a-z])worker[_\-=]?\d+(?:[.\-][^_]*)?_\d+\.", re.IGNORECASE)


def rank_in_name(path: Path) -> int | None:
    """Returns the rank that a file's name states; None where it states none, or several.

    >>> rank_in_name(Path("worker3_step_12.1694128201557.pt.trace.json.gz"))
    3
    >>> rank_in_name(Path("rank0_worker1.json")), rank_in_name(Path("frank7.json"))
    (None, None)
    >>> rank_in_name(Path("job-worker-0_1234.1699.pt.trace.json"))
    """
    if _HOST.search(path.name) or _SEVERAL.search(path.name):
        return None
    found = _RANK.findall(path.name)
    return int(found[0]) if len(found) == 1 else None


def resolve_rank(path: Path, in_file: int | None, given: int | None) -> tuple[int, bool]:
    """Returns the rank of a trace, and whether only its name tells it.

    Args:
        path: The file.
        in_file: The rank in the file's metadata.
        given: The rank that the user stated.

    Raises:
        InputError: Nothing states the rank, or the file and the user differ.
    """
    if in_file is not None:
        if given is not None and given != in_file:
            raise InputError(
                f"{path} says it is rank {in_file}, not {given}.",
                "Leave --rank out, or give the file of the other rank.",
            )
        return in_file, False
    if given is not None:
        return given, False
    named = rank_in_name(path)
    if named is None:
        raise InputError(
            f"{path} does not say which rank it is of: it has no distributedInfo.rank.",
            "State it with --rank N, or put it into the file's name, such as rank0.json.",
        )
    return named, True
