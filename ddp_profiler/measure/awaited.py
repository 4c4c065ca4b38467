"""What the values that ranks wait for are, in words for a user."""

from __future__ import annotations

import re

_KEYS = (
    (r"done/(\d+)", "the end of a level of other ranks"),
    (r"kineto/done/(\d+)", "the end of a level's steps under torch.profiler"),
    (r"kineto/problem/\d+/(\d+)", "rank {} to write its trace of torch.profiler"),
    (r"machine/\d+/(\d+)", "rank {} to say what its machine gave it"),
    (r"clock group/(\d+)", "rank {} to say whether it can compare clocks"),
    (r"clock groups", "rank 0 to say whether clocks can be compared"),
    (r"clock/\w+/(\d+)", "rank {} to compare clocks"),
    (r"place/(\d+)", "rank {} to say where it runs"),
    (r"environment/(\d+)", "node {} to describe itself"),
    (r"run", "rank 0's run folder"),
    (r"home/(\d+)", "rank {} to find its run folder"),
    (r"homes", "rank 0 to settle the run folders"),
    (r"described", "rank 0's description of the run"),
    (r"facts", "rank 0's facts of the levels"),
    (r"part/(\d+)", "rank {} to offer its file"),
    (r"part/\d+/go", "rank 0 to ask for this rank's file"),
    (r"closed/(\d+)", "rank {} to finish"),
    (r"all closed", "rank 0 to say that all ranks are done"),
)


def in_words(key: str) -> str:
    """Says what a key of the store stands for.

    >>> in_words("machine/1/3"), in_words("all closed")
    ('rank 3 to say what its machine gave it', 'rank 0 to say that all ranks are done')
    """
    for pattern, words in _KEYS:
        if found := re.fullmatch(pattern, key):
            return words.format(*found.groups())
    return repr(key)
