"""Which rank this process is, and which ranks make up the levels of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_profiler.batch import Batch, solve
from ddp_profiler.config import DEFAULT_MICRO_BATCH, MAX_ACCUMULATION, StudyConfig
from ddp_profiler.errors import UsageError
from ddp_profiler.schema import LevelSettings, RankPlace

_REMEDY = "Start it with torchrun, which sets these variables, or unset them for dp = 1."


@dataclass(frozen=True)
class Topology:
    """This process's place in the launch, in torchrun's terms.

    Attributes:
        rank: Global rank.
        local_rank: Rank within the node.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this node.
        launched: Whether a launcher set the variables; false for a lone process.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    Raises:
        UsageError: Some are missing, are no numbers, or contradict each other.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Topology(rank=0, local_rank=0, world_size=1, local_world_size=1, launched=False)
    for name in ("RANK", "WORLD_SIZE"):
        if name not in environ:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise UsageError(f"{other} is set to {environ[other]} but {name} is not set.", _REMEDY)
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={world_size} contradict each other: "
            "a rank is at least 0 and below the world size.",
            _REMEDY,
        )
    local_rank = _number(environ, "LOCAL_RANK", default=rank)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size)
    if not (0 <= local_rank < local_world_size <= world_size) or local_rank > rank:
        raise UsageError(
            f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size} contradict "
            f"RANK={rank} and WORLD_SIZE={world_size}.",
            _REMEDY,
        )
    if world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise UsageError(f"WORLD_SIZE={world_size} but {name} is not set.", _REMEDY)
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise UsageError(f"MASTER_PORT={port} is no port (1 to 65535).", _REMEDY)
    return Topology(rank, local_rank, world_size, local_world_size, launched=True)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number.", _REMEDY) from None


def default_dp(world_size: int) -> tuple[int, ...]:
    """Returns the powers of two up to the world size, and the world size itself.

    >>> default_dp(6)
    (1, 2, 4, 6)
    """
    powers = [1 << k for k in range(world_size.bit_length()) if 1 << k <= world_size]
    return tuple(powers if powers[-1] == world_size else [*powers, world_size])


def plan_levels(config: StudyConfig, world_size: int) -> tuple[LevelSettings, ...]:
    """Plans the levels of a study before ranks meet: each dp with each accumulation.

    A level at dp = n is put on ranks 0..n-1; :func:`place_levels` has the last word.

    Raises:
        UsageError: A dp is larger than the world, or no whole numbers make the global batch.
    """
    sizes = default_dp(world_size) if config.dp is None else config.dp
    too_large = [n for n in sizes if n > world_size]
    if too_large:
        raise UsageError(
            f"--dp {','.join(map(str, too_large))} is larger than the world of {world_size} "
            f"rank{'s' if world_size > 1 else ''}.",
            f"Start more ranks (torchrun --nproc_per_node {max(too_large)}) or lower --dp.",
        )
    batches = _plan_batches(config, sizes)
    most = max(batch.accumulation for batch in batches)
    if most > MAX_ACCUMULATION:
        raise UsageError(
            f"--global-batch {config.global_batch} needs accumulation {most}, above "
            f"{MAX_ACCUMULATION}.",
            "Raise --micro-batch.",
        )
    return tuple(
        LevelSettings(
            id=_level_id(batch, batches),
            dp=batch.dp,
            micro_batch=batch.micro_batch,
            accumulation=batch.accumulation,
            placement="packed",
            ranks=tuple(range(batch.dp)),
        )
        for batch in batches
    )


def place_levels(
    levels: Sequence[LevelSettings], places: Sequence[RankPlace], placement: str
) -> tuple[LevelSettings, ...]:
    """Puts planned levels on ranks, once it is known which rank is on which node.

    A packed level fills node after node. A spread level takes one rank of each node in turn;
    it exists only where it uses more nodes than the packed one, so never at dp = 1 nor at the
    world size. Ranks are in ascending order, as torch orders a group; since torchrun numbers
    them node by node, a ring crosses each boundary between nodes once.

    Args:
        levels: As :func:`plan_levels` returns them.
        places: Where each rank runs, the same on all ranks.
        placement: ``packed``, ``spread`` or ``both``.

    Returns:
        The levels, each spread one behind the packed one of the same setting.
    """
    nodes = {place.rank: place.node for place in places}
    by_node: dict[int, list[int]] = {}
    for rank in sorted(nodes):
        by_node.setdefault(nodes[rank], []).append(rank)
    packed = [rank for node in sorted(by_node) for rank in by_node[node]]
    turns = {rank: turn for members in by_node.values() for turn, rank in enumerate(members)}
    spread = sorted(packed, key=lambda rank: (turns[rank], nodes[rank]))
    placed = []
    for level in levels:
        close, wide = (tuple(sorted(order[: level.dp])) for order in (packed, spread))
        wider = len({nodes[rank] for rank in wide}) > len({nodes[rank] for rank in close})
        if not wider or placement != "spread":
            placed.append(replace(level, ranks=close, placement="packed"))
        if wider and placement != "packed":
            name = f"{level.id}-spread"
            placed.append(replace(level, id=name, ranks=wide, placement="spread"))
    return tuple(placed)


def _plan_batches(config: StudyConfig, sizes: tuple[int, ...]) -> list[Batch]:
    """Returns the batch of each level: kept as given, or solved for the global batch."""
    micro_batch, total = config.micro_batch, config.global_batch
    if total is None:
        if config.scaling == "strong":
            raise UsageError(
                "--scaling strong keeps the global batch, and --global-batch is not given.",
                "Give --global-batch N.",
            )
        accumulations = config.accumulate or (1,)
        fixed = micro_batch or DEFAULT_MICRO_BATCH
        return [Batch(fixed, k, n) for n in sizes for k in accumulations]
    if config.scaling == "weak" and len(sizes) > 1:
        raise UsageError(
            "--scaling weak lets the global batch grow with dp, and --global-batch fixes it.",
            "Leave one of the two out.",
        )
    if config.accumulate is None:
        fixed = micro_batch or DEFAULT_MICRO_BATCH
        return [solve(total, n, micro_batch=fixed) for n in sizes]
    return [
        solve(total, n, micro_batch=micro_batch, accumulation=k)
        for n in sizes
        for k in config.accumulate
    ]


def _level_id(batch: Batch, batches: list[Batch]) -> str:
    """Names a level by what differs between levels."""
    name = f"dp{batch.dp}"
    if len({b.micro_batch for b in batches}) > 1:
        name += f"-mb{batch.micro_batch}"
    if batch.accumulation > 1 or len({b.accumulation for b in batches}) > 1:
        name += f"-acc{batch.accumulation}"
    return name
