"""Faults planted on purpose, so that tests can check what the profiler makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddp_profiler.errors import UsageError
from ddp_profiler.workload.pacing import precise_sleep

PARTS = ("data", "forward", "between", "backward", "copy", "optimizer")
"""Where a delay can be planted.

``between`` lies between forward and backward, ``copy`` after DDP has copied its buckets back.
"""

LOSS_FACTORS = ("dp", "accumulation", "dp*accumulation")
"""Settings by which the loss can be multiplied; a number will do as well."""

FATES = ("KILL", "TERM", "STOP", "raise", "memory", "fill", "loop")
"""What can become of a rank: a signal, an exception, or a loop without an end.

``memory`` is the exception of an allocator that gets no more; ``fill`` takes memory until the
system ends the process, and needs a cgroup with a limit of its own.
"""

_FORM = (
    "Give it as part=PART,ms=MS[,rank=R][,every=N][,level_dp=N], as "
    "clock=MS,rank=R[,ppm=X][,real_ms=MS], as sync=always, as loss=FACTOR with "
    f"{', '.join(LOSS_FACTORS)} or a number, or as fate=FATE,rank=R,phase=TEXT[,after_ms=MS]"
    f"[,note=FILE] with {', '.join(FATES)}."
)
_DELAY_KEYS = ("part", "ms", "rank", "every", "level_dp")
_FATE_KEYS = ("fate", "rank", "phase", "after_ms", "note")
_CLOCK_KEYS = ("clock", "rank", "ppm", "real_ms")


@dataclass(frozen=True)
class Plant:
    """A delay planted in one part of the step.

    Attributes:
        part: One of `PARTS`.
        ms: Length in ms.
        rank: The rank that is delayed; all ranks where None.
        every: Steps 0, N, 2N, ... are delayed.
        level_dp: The only level, by its dp, that is delayed; all levels where None.
    """

    part: str
    ms: float
    rank: int | None = None
    every: int = 1
    level_dp: int | None = None

    def applies(self, part: str, rank: int, step: int) -> bool:
        """Tells whether this delay falls on a part, a rank and an optimizer step."""
        return (
            part == self.part
            and (self.rank is None or rank == self.rank)
            and step % self.every == 0
        )


@dataclass(frozen=True)
class PlantedLoss:
    """A loss that is multiplied by what it should not be.

    Attributes:
        factor: One of `LOSS_FACTORS`, or a number.
    """

    factor: str | float

    def value(self, dp: int, accumulation: int) -> float:
        """Returns the factor as a number, at a level of these settings."""
        if isinstance(self.factor, str):
            settings = {"dp": dp, "accumulation": accumulation}
            return float(math.prod(settings[name] for name in self.factor.split("*")))
        return self.factor


@dataclass(frozen=True)
class PlantedClock:
    """A rank whose clocks are wrong.

    Attributes:
        rank: The rank.
        offset_ms: Its monotonic clock is ahead by so much.
        ppm: It runs fast by so many millionths, counted from the host's boot.
        real_ms: Its real time is ahead by so much.
    """

    rank: int
    offset_ms: float
    ppm: float = 0.0
    real_ms: float = 0.0


@dataclass(frozen=True)
class PlantedSync:
    """Gradients that are reduced in every micro-step, as if ``no_sync`` had been forgotten."""


@dataclass(frozen=True)
class PlantedFate:
    """What becomes of a rank.

    Attributes:
        fate: One of `FATES`.
        rank: The rank.
        phase: A part of the name of the phase in which it comes.
        after_ms: How long after that phase has begun for the first time; phase or not by then.
        note: File to which the phase that the rank is in by then is written, just before.
    """

    fate: str
    rank: int
    phase: str
    after_ms: float = 0.0
    note: str = ""


Planted = Plant | PlantedLoss | PlantedClock | PlantedSync | PlantedFate


def planted_clock(plants: Sequence[Planted], rank: int) -> PlantedClock | None:
    """Returns what is wrong with a rank's clocks; None where nothing is."""
    return next((p for p in plants if isinstance(p, PlantedClock) and p.rank == rank), None)


def parse_plants(specs: Sequence[str]) -> tuple[Planted, ...]:
    """Reads faults: ``part=backward,ms=30[,rank=1][,every=10][,level_dp=2]`` and others.

    Others are ``loss=dp``, ``sync=always``, ``clock=5000,rank=1[,ppm=50][,real_ms=300]`` and
    ``fate=KILL,rank=1,phase=instrumented[,after_ms=20][,note=FILE]``.

    >>> parse_plants(["part=data,ms=20,rank=1", "loss=dp*accumulation"])[1].value(4, 2)
    8.0

    Raises:
        UsageError: A text does not have that form, or a value is out of its range.
    """
    return tuple(_parse(spec) for spec in specs)


def check_plants(plants: Sequence[Planted], world_size: int, dps: Sequence[int]) -> None:
    """Checks that each fault can fall on something: a typo must not look like a clean run.

    Args:
        plants: All faults.
        world_size: Number of ranks.
        dps: Data-parallel sizes of the levels.

    Raises:
        UsageError: A rank or a level does not exist, or a rank's clock is given twice.
    """
    clocks: set[int] = set()
    for plant in plants:
        rank = getattr(plant, "rank", None)
        if rank is not None and rank >= world_size:
            raise UsageError(
                f"A fault is planted on rank {rank}, and there are {world_size} ranks.", _FORM
            )
        level_dp = getattr(plant, "level_dp", None)
        if level_dp is not None and level_dp not in dps:
            raise UsageError(f"A fault is planted at dp {level_dp}, and no level has it.", _FORM)
        if isinstance(plant, PlantedClock):
            if plant.rank in clocks:
                raise UsageError(f"The clock of rank {plant.rank} is planted twice.", _FORM)
            clocks.add(plant.rank)


class Planter:
    """Carries out the planted faults of one rank at one level.

    Args:
        plants: All faults; delays for other ranks and levels are left out.
        rank: This rank.
        sleep: Waits for a time in s.
        dp: Level that is run. A delay with a ``level_dp`` applies at that level only,
            and nowhere where this is None.

    Attributes:
        always_syncs: Whether gradients are reduced in every micro-step.
    """

    def __init__(
        self,
        plants: Sequence[Planted],
        rank: int,
        sleep: Callable[[float], None] = precise_sleep,
        *,
        dp: int | None = None,
    ) -> None:
        delays = [p for p in plants if isinstance(p, Plant)]
        mine = [p for p in delays if p.rank in (None, rank) and p.level_dp in (None, dp)]
        self._rank = rank
        self._sleep = sleep
        self._by_part: Mapping[str, tuple[Plant, ...]] = {
            part: tuple(p for p in mine if p.part == part) for part in PARTS
        }
        self._losses = tuple(p for p in plants if isinstance(p, PlantedLoss))
        self.always_syncs = any(isinstance(p, PlantedSync) for p in plants)

    def ms(self, part: str, step: int) -> float:
        """Returns the delay in ms that is planted in a part of an optimizer step."""
        plants = self._by_part[part]
        if not plants:
            return 0.0
        return sum(p.ms for p in plants if p.applies(part, self._rank, step))

    def delay(self, part: str, step: int) -> None:
        """Waits as long as is planted in a part of an optimizer step."""
        if self._by_part[part] and (ms := self.ms(part, step)):
            self._sleep(ms / 1000)

    def loss_factor(self, level_dp: int, accumulation: int) -> float:
        """Returns what the loss is multiplied by at a level; 1 where nothing is planted."""
        return math.prod((p.value(level_dp, accumulation) for p in self._losses), start=1.0)


def _parse(spec: str) -> Planted:
    key, _, value = (text.strip() for text in spec.partition("="))
    if key == "loss":
        return _parse_loss(spec, value)
    if key == "sync":
        return _parse_sync(spec, value)
    if key == "fate":
        return _parse_fate(spec)
    return _parse_clock(spec) if key == "clock" else _parse_delay(spec)


def _parse_fate(spec: str) -> PlantedFate:
    values = _values(spec, _FATE_KEYS)
    if values["fate"] not in FATES:
        raise _wrong(spec, f"fate={values['fate']} is none of {', '.join(FATES)}")
    rank, phase = _whole(spec, values, "rank", 0), values.get("phase", "")
    if rank is None or not phase:
        raise _wrong(spec, "rank or phase is missing")
    after_ms = _number(spec, values, "after_ms")
    if after_ms < 0:
        raise _wrong(spec, f"after_ms={after_ms:g} is below 0")
    return PlantedFate(values["fate"], rank, phase, after_ms, values.get("note", ""))


def _parse_sync(spec: str, text: str) -> PlantedSync:
    if text != "always":
        raise _wrong(spec, f"sync={text} is not always")
    return PlantedSync()


def _parse_loss(spec: str, text: str) -> PlantedLoss:
    name = text.replace(" ", "")
    if name in LOSS_FACTORS:
        return PlantedLoss(name)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number == 0:
        raise _wrong(
            spec, f"loss={text} is none of {', '.join(LOSS_FACTORS)}, nor a number other than 0"
        )
    return PlantedLoss(number)


def _parse_clock(spec: str) -> PlantedClock:
    values = _values(spec, _CLOCK_KEYS)
    rank = _whole(spec, values, "rank", 0)
    if rank is None:
        raise _wrong(spec, "rank is missing")
    return PlantedClock(
        rank=rank,
        offset_ms=_number(spec, values, "clock"),
        ppm=_number(spec, values, "ppm"),
        real_ms=_number(spec, values, "real_ms"),
    )


def _parse_delay(spec: str) -> Plant:
    values = _values(spec, _DELAY_KEYS)
    for key in ("part", "ms"):
        if key not in values:
            raise _wrong(spec, f"{key} is missing")
    if values["part"] not in PARTS:
        raise _wrong(spec, f"part={values['part']} is none of {', '.join(PARTS)}")
    return Plant(
        part=values["part"],
        ms=_milliseconds(spec, values["ms"]),
        rank=_whole(spec, values, "rank", 0),
        every=_whole(spec, values, "every", 1) or 1,
        level_dp=_whole(spec, values, "level_dp", 1),
    )


def _values(spec: str, keys: Sequence[str]) -> dict[str, str]:
    """Splits ``key=value,...``; each key at most once and one of ``keys``."""
    values: dict[str, str] = {}
    for item in spec.split(","):
        key, equals, value = (text.strip() for text in item.partition("="))
        if not equals:
            raise _wrong(spec, f"{item.strip()!r} is not of the form key=value")
        if key not in keys:
            raise _wrong(spec, f"there is no option {key}")
        if key in values:
            raise _wrong(spec, f"{key} is given twice")
        values[key] = value
    return values


def _number(spec: str, values: Mapping[str, str], key: str) -> float:
    """Reads a number of either sign; 0 where there is none."""
    text = values.get(key, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _wrong(spec, f"{key}={text} is not a number")
    return value


def _milliseconds(spec: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _wrong(spec, f"ms={text} is not a number above 0")
    return value


def _whole(spec: str, values: Mapping[str, str], key: str, least: int) -> int | None:
    if key not in values:
        return None
    text = values[key]
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise _wrong(spec, f"{key}={text} is not a whole number of at least {least}")
    return int(text)


def _wrong(spec: str, what: str) -> UsageError:
    return UsageError(f"Planted fault {spec!r}: {what}.", _FORM)
