"""world_size = dp x tp x pp, solved for what is left open."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_profiler.errors import UsageError


@dataclass(frozen=True)
class Parallel:
    """How devices are shared out.

    Attributes:
        dp: Data-parallel replicas.
        tp: Devices of a tensor-parallel group.
        pp: Stages of a pipeline.
    """

    dp: int
    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        """Devices: dp x tp x pp."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"{self.dp} x {self.tp} x {self.pp} = {self.world_size}"


def solve_parallel(
    world_size: int | None, dp: int | None, tp: int | None, pp: int | None
) -> Parallel | None:
    """Solves for what is left open; tp and pp are 1 where dp is open too.

    >>> solve_parallel(16, None, 2, 2), solve_parallel(16, 4, 2, None)
    (Parallel(dp=4, tp=2, pp=2), Parallel(dp=4, tp=2, pp=2))
    >>> solve_parallel(None, None, 2, None) is None
    True

    Returns:
        The sizes; None where dp stays open.

    Raises:
        UsageError: No whole number solves it, the numbers contradict each other, or more than
            one stays open. The message has all numbers and the nearest settings that are legal.
    """
    if world_size is None:
        return None if dp is None else Parallel(dp, tp or 1, pp or 1)
    if dp is None:
        tp, pp = tp or 1, pp or 1
        asked = Parallel(max(1, round(world_size / (tp * pp))), tp, pp)
    elif tp is None and pp is None:
        share, rest = divmod(world_size, dp)
        if rest == 0 and share > 1:
            raise UsageError(
                f"World size {world_size} at dp {dp} leaves tp x pp = {share} open.",
                f"Give one of them: --tp {share} ({dp} x {share} x 1), or --pp {share} "
                f"({dp} x 1 x {share}).",
            )
        asked = Parallel(dp)
    elif tp is None:
        asked = Parallel(dp, max(1, round(world_size / (dp * (pp or 1)))), pp or 1)
    elif pp is None:
        asked = Parallel(dp, tp, max(1, round(world_size / (dp * tp))))
    else:
        asked = Parallel(dp, tp, pp)
    if asked.world_size != world_size:
        legal = "; ".join(str(sizes) for sizes in nearest_legal(world_size, asked))
        raise UsageError(
            f"World size {world_size} is not dp x tp x pp: {asked}.",
            f"Nearest legal settings: {legal}.",
        )
    return asked


def nearest_legal(world_size: int, asked: Parallel) -> tuple[Parallel, ...]:
    """Returns settings near to what was asked that make a world size.

    First those that keep the world size: another dp, or where tp x pp does not divide it
    another tp with its dp; then the nearest world sizes that keep tp and pp.

    >>> [str(sizes) for sizes in nearest_legal(16, Parallel(5, 3, 1))]
    ['8 x 2 x 1 = 16', '5 x 3 x 1 = 15', '6 x 3 x 1 = 18']
    """
    each = asked.tp * asked.pp
    found = []
    if world_size % each == 0:
        found.append(Parallel(world_size // each, asked.tp, asked.pp))
    elif world_size % asked.pp == 0:
        left = world_size // asked.pp
        sizes = [n for n in range(1, left + 1) if left % n == 0]
        tp = min(sizes, key=lambda n: abs(n - asked.tp))
        found.append(Parallel(left // tp, tp, asked.pp))
    below = world_size // each
    found += [Parallel(n, asked.tp, asked.pp) for n in (below, below + 1) if n >= 1]
    return tuple(dict.fromkeys(found))
