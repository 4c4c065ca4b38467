"""Whether two sides of launches may be compared, and what differs between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ddp_profiler.analysis.comparison import LaunchFigures
from ddp_profiler.analysis.results import LevelResult, Summary

_GIB = 2**30

_MACHINE = {
    "device_type": "device",
    "cpu": "processor",
    "cores": "cores",
    "gpus": "GPUs",
}
_SOFTWARE = {
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "python": "Python",
    "platform": "platform",
}
_IN_FORCE = {
    "backend": "backend",
    "threads_per_rank": "threads a rank",
    "local_world_size": "ranks a node",
}
_NO_MATTER = frozenset({"out", "timeout_s", "debug", "model", "backend", "threads_per_rank"})
"""Settings that change nothing of a step, or that are told in another form."""


class Kind(StrEnum):
    """What differs."""

    MACHINE = "machine"
    """The hardware: what is compared is then not the code alone."""
    HOST = "host"
    """Only the host's name."""
    SOFTWARE = "software"
    """Versions, this tool's included."""
    SETTING = "setting"
    """Anything else that decides what a step takes."""


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on both sides.

    Attributes:
        kind: What it belongs to.
        name: What it is.
        base: In BASE; several values with commas.
        new: In NEW.
    """

    kind: Kind
    name: str
    base: str
    new: str


@dataclass(frozen=True)
class Launch:
    """One launch, as a comparison sees it.

    Attributes:
        name: Its folder.
        summary: Its figures.
        parameters: Trainable parameters by level, as far as known.
    """

    name: str
    summary: Summary
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class Pairing:
    """A level that both sides have.

    Attributes:
        name: Its id; both where they differ.
        base: Its id in BASE.
        new: Its id in NEW.
    """

    name: str
    base: str
    new: str


@dataclass(frozen=True)
class Comparability:
    """What both sides have in common, and what not.

    Attributes:
        differences: What differs, the machine first.
        obstacles: Why a comparison would mean nothing, in whole sentences; empty if none.
        notes: What a reader has to know.
        pairs: The levels that both sides have.
    """

    differences: tuple[Difference, ...]
    obstacles: tuple[str, ...]
    notes: tuple[str, ...]
    pairs: tuple[Pairing, ...]

    def differ(self, kind: Kind) -> tuple[Difference, ...]:
        """Returns the differences of a kind."""
        return tuple(one for one in self.differences if one.kind == kind)


def examine(base: Sequence[Launch], new: Sequence[Launch]) -> Comparability:
    """Compares what both sides are, not how fast.

    Args:
        base: Launches of BASE, one or more.
        new: Launches of NEW, one or more.
    """
    described = [[_described(one) for one in side] for side in (base, new)]
    kinds = {key: kind for side in described for one in side for key, (kind, _) in one.items()}
    differences = []
    obstacles = []
    for key, kind in kinds.items():
        values = [_distinct(one.get(key, (kind, ""))[1] for one in side) for side in described]
        if values[0] != values[1]:
            shown = [", ".join(text or "none" for text in side) for side in values]
            differences.append(Difference(kind, key, shown[0], shown[1]))
        for name, side in zip(("BASE", "NEW"), values, strict=True):
            if len(side) > 1 and kind != Kind.HOST:
                text = " and ".join(value or "none" for value in side)
                obstacles.append(f"The launches of {name} are not alike: {key} {text}.")
    differences.sort(key=lambda one: list(Kind).index(one.kind))
    pairs = _pairs(base, new)
    return Comparability(
        differences=tuple(differences),
        obstacles=(*_work_obstacles(base, new, pairs), *obstacles),
        notes=tuple(_notes(base, new, pairs)),
        pairs=pairs,
    )


def figures(
    launches: Sequence[Launch], levels: Mapping[str, str]
) -> dict[str, list[LaunchFigures]]:
    """Returns what each launch says about levels, by the name of the pair.

    Args:
        launches: One side.
        levels: Id of the level by name of the pair.
    """
    found: dict[str, list[LaunchFigures]] = {name: [] for name in levels}
    for launch in launches:
        by_id = {level.id: level for level in launch.summary.levels}
        for name, level_id in levels.items():
            found[name].append(_figures(by_id[level_id]))
    return found


def _figures(level: LevelResult) -> LaunchFigures:
    step, late = level.step_ms, level.straggler
    if step is None:
        raise ValueError(f"level {level.id} has no plain step")
    return LaunchFigures(
        step_ms=step.median,
        parts_ms=level.breakdown_ms,
        step_ci95_ms=step.ci95,
        parts_ci95_ms=level.breakdown_ci95_ms,
        late=None if late is None or not late.fixed else (late.rank, late.cause),
    )


def _measured(launch: Launch) -> dict[str, LevelResult]:
    """Returns the levels of a launch that have a step time."""
    return {one.id: one for one in launch.summary.levels if one.step_ms is not None}


def _common(launches: Sequence[Launch]) -> dict[str, LevelResult]:
    """Returns the levels that all launches of a side have, as the first has them."""
    shared = set.intersection(*(set(_measured(one)) for one in launches))
    return {name: level for name, level in _measured(launches[0]).items() if name in shared}


def _pairs(base: Sequence[Launch], new: Sequence[Launch]) -> tuple[Pairing, ...]:
    """Pairs levels by id, then by dp, placement and global batch, then the only one of each."""
    left, right = _common(base), _common(new)
    pairs = [Pairing(name, name, name) for name in left if name in right]
    rest = [
        {k: v for k, v in side.items() if k not in {p.base for p in pairs}}
        for side in (left, right)
    ]
    work = [_by_work(side) for side in rest]
    for key in [key for key in work[0] if key in work[1]]:
        ours, theirs = work[0][key], work[1][key]
        if ours and theirs and not any(p.base == ours for p in pairs):
            pairs.append(Pairing(f"{ours} / {theirs}", ours, theirs))
    if not pairs and len(left) == len(right) == 1:
        (ours,), (theirs,) = left, right
        pairs.append(Pairing(f"{ours} / {theirs}", ours, theirs))
    return tuple(pairs)


def _by_work(levels: Mapping[str, LevelResult]) -> dict[tuple[int, str, int], str | None]:
    """Returns the only level of each dp, placement and global batch; None where there are more."""
    found: dict[tuple[int, str, int], str | None] = {}
    for name, level in levels.items():
        if level.global_batch is not None:
            key = (level.dp, level.placement, level.global_batch)
            found[key] = None if key in found else name
    return found


def _work_obstacles(
    base: Sequence[Launch], new: Sequence[Launch], pairs: Sequence[Pairing]
) -> list[str]:
    """Says where a step of NEW is not the same work as one of BASE."""
    found = []
    before, after = _model(base[0]), _model(new[0])
    if before != after:
        found.append(f"The models differ: {before} in BASE, {after} in NEW.")
    if not pairs:
        names = [", ".join(_common(side)) or "none" for side in (base, new)]
        found.append(f"No level is on both sides: BASE has {names[0]}, NEW has {names[1]}.")
    ours, theirs = _common(base), _common(new)
    for pair in pairs:
        one, other = ours[pair.base], theirs[pair.new]
        if one.dp != other.dp:
            found.append(f"{pair.name}: dp {one.dp} in BASE, {other.dp} in NEW.")
        batches = _samples(one), _samples(other)
        if batches[0] != batches[1]:
            found.append(
                f"{pair.name}: a step has {_known(batches[0])} samples in BASE, "
                f"{_known(batches[1])} in NEW."
            )
        counts = base[0].parameters.get(pair.base), new[0].parameters.get(pair.new)
        if None not in counts and counts[0] != counts[1]:
            found.append(
                f"{pair.name}: the model has {counts[0]} parameters in BASE, {counts[1]} in NEW."
            )
    return found


def _samples(level: LevelResult) -> int | None:
    """Returns the samples of a step: those seen, else those that the settings give."""
    return level.batch_check.observed or level.global_batch


def _known(value: int | None) -> str:
    return "an unknown number of" if value is None else str(value)


def _model(launch: Launch) -> str:
    """Returns a model without its options; scripts may be named differently and be the same."""
    settings = launch.summary.run.settings
    name = str(settings.get("model") or "")
    if "script" in settings:
        return "a script"
    head, _, rest = name.partition(":")
    factory = rest.partition(":")[0]
    return f"{head}:{factory}" if factory and "=" not in factory else head


def _notes(
    base: Sequence[Launch], new: Sequence[Launch], pairs: Sequence[Pairing]
) -> Iterator[str]:
    same = {one.summary.run.run_id for one in base} & {one.summary.run.run_id for one in new}
    if same:
        yield f"The same run is on both sides: {', '.join(sorted(same))}."
    for name, side in (("BASE", base), ("NEW", new)):
        cut = [one.name for one in side if one.summary.run.partial]
        if cut:
            yield f"Not whole, read as far as they go ({name}): {', '.join(cut)}."
    for name, levels, known in (
        ("BASE", _common(base), {pair.base for pair in pairs}),
        ("NEW", _common(new), {pair.new for pair in pairs}),
    ):
        alone = [level for level in levels if level not in known]
        if alone and pairs:
            yield f"Only in {name}, left out: {', '.join(alone)}."
    if not same and len(base) > 1 and len(new) > 1:
        # Both in ISO 8601; equal zones are all that one machine has.
        times = [[one.summary.run.created for one in side] for side in (base, new)]
        if max(times[0]) < min(times[1]) or max(times[1]) < min(times[0]):
            yield (
                "All launches of one side came before those of the other: a machine that became "
                "slower meanwhile looks like the code. Alternate them."
            )


def _described(launch: Launch) -> dict[str, tuple[Kind, str]]:
    """Returns what decides what a step takes, by name, as text."""
    run = launch.summary.run
    nodes = [run.environment[node] for node in sorted(run.environment)]
    found: dict[str, tuple[Kind, str]] = {}

    def add(kind: Kind, name: str, values: Iterable[object]) -> None:
        found[name] = (kind, " + ".join(_distinct(_text(value) for value in values)))

    add(Kind.MACHINE, "nodes", [run.nodes])
    for key, name in _MACHINE.items():
        add(Kind.MACHINE, name, [node.get(key) for node in nodes])
    memory = [node.get("memory_bytes") for node in nodes]
    sizes = [f"{size / _GIB:.0f} GiB" for size in memory if isinstance(size, (int, float))]
    add(Kind.MACHINE, "memory", sizes)
    add(Kind.HOST, "host", [node.get("hostname") for node in nodes])
    for key, name in _SOFTWARE.items():
        add(Kind.SOFTWARE, name, [node.get(key) for node in nodes])
    add(Kind.SOFTWARE, "ddp_profiler", [run.profiler_version])
    add(Kind.SETTING, "ranks", [run.world_size])
    for key, name in _IN_FORCE.items():
        add(Kind.SETTING, name, [node.get(key) for node in nodes])
    for node in nodes:
        variables = node.get("variables")
        for key, value in (variables if isinstance(variables, Mapping) else {}).items():
            add(Kind.SETTING, str(key), [value])
    for key, value in _flat(run.settings):
        if key not in _NO_MATTER:
            add(Kind.SETTING, key, [value])
    return found


def _flat(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            for inner, item in value.items():
                yield f"{key}.{inner}", item
        else:
            yield key, value


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    """Returns each text once, in the order of first use."""
    return tuple(dict.fromkeys(values))
