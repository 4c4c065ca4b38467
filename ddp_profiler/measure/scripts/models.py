"""The DistributedDataParallels of a script, and what counts of them; none is kept alive by it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.measure.ddp_adapter import DdpAdapter
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.construction import Construction
from ddp_profiler.schema import DdpFacts, ParameterFacts


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the models that are trained, at one moment.

    Attributes:
        elements: Elements of the parameters that are reduced.
        reduced: Those parameters.
        bucket_bytes: Sizes of all buckets; None where DDP has none for good, or does not tell.
        ddps: How each was built.
        sources: Which mechanism gives each figure; None where one of the models has none.
        group_size: Ranks of the first one's group.
        backend: The backend of that group.
        device: Where the first one's parameters are.
    """

    elements: int
    reduced: tuple[ParameterFacts, ...]
    bucket_bytes: tuple[int, ...] | None
    ddps: tuple[DdpFacts, ...]
    sources: dict[str, str | None]
    group_size: int
    backend: str
    device: torch.device


class Models:
    """The models that a script has built so far, with a number each, in that order.

    Those that are observed are trained ones where any was called with gradients; the others of
    them, such as one that was built and replaced, count nowhere then.

    Attributes:
        ever_trained: Numbers of all that were ever called with gradients, gone or not.
    """

    def __init__(self) -> None:
        self.ever_trained: set[int] = set()
        self._built: weakref.WeakKeyDictionary[DDP, Construction] = weakref.WeakKeyDictionary()
        self._count = 0
        self._adapters: list[DdpAdapter] = []
        self._trained: weakref.WeakSet[DDP] = weakref.WeakSet()
        self._any_trained = False
        self._known: ModelFacts | None = None

    def note(self, ddp: DDP, built_by: str) -> None:
        """Notes how a model was built, unless that is known."""
        if ddp not in self._built:
            self._built[ddp] = Construction(ddp, built_by, self._count)
            self._count += 1

    def observe(self, ddp: DDP, recorder: Recorder) -> DdpAdapter:
        """Has a model, which has been noted, observed from now on.

        Returns:
            What observes it, not attached yet.
        """
        adapter = DdpAdapter(ddp, recorder, number=self._built[ddp].number)
        self._adapters = [*self.adapters(), adapter]
        return adapter

    def adapters(self) -> list[DdpAdapter]:
        """Returns what observes the models that are still there."""
        for adapter in self._adapters:
            if adapter.ddp is None:
                adapter.detach()
        self._adapters = [adapter for adapter in self._adapters if adapter.ddp is not None]
        return self._adapters

    def observes(self, ddp: DDP) -> bool:
        """Tells whether a model is observed."""
        return any(adapter.ddp is ddp for adapter in self._adapters)

    def train(self, ddp: DDP) -> None:
        """Notes that a model was called with gradients."""
        self._trained.add(ddp)
        self.ever_trained.add(self._built[ddp].number)
        self._any_trained = True

    @property
    def built(self) -> list[DDP]:
        """All models that are still there, observed or not."""
        return list(self._built)

    @property
    def observed(self) -> dict[int, DDP]:
        """The models that are observed and still there, by their numbers."""
        found = (adapter.ddp for adapter in self._adapters)
        return {self._built[ddp].number: ddp for ddp in found if ddp is not None}

    @property
    def counted(self) -> dict[int, DDP]:
        """Those of them that are trained; all where none was called with gradients."""
        observed = self.observed
        trained = {number: ddp for number, ddp in observed.items() if ddp in self._trained}
        return trained or observed

    def reduced(self, ddps: Mapping[int, DDP]) -> dict[str, nn.Parameter]:
        """Returns the parameters that models reduce, each once, frozen and ignored ones not.

        Args:
            ddps: The models by their numbers, which names of several begin with.
        """
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for number, ddp in ddps.items():
            for name, parameter in self._built[ddp].reduced.items():
                # Names of several models may be equal.
                key = f"{number}.{name}" if len(ddps) > 1 else name
                found.setdefault(id(parameter), (key, parameter))
        return dict(found.values())

    def facts(self, *, rebuilt: bool) -> ModelFacts | None:
        """Returns what is known of the models that are trained.

        Where those are gone, as when the function that trains them has returned, it is what was
        known when it was last :meth:`keep`-ed.

        Args:
            rebuilt: Whether DDP has built its buckets for good.

        Returns:
            The facts; None where there was no model.
        """
        counted = self.counted
        gone = self._any_trained and not any(ddp in self._trained for ddp in counted.values())
        if not counted or (gone and self._known is not None):
            return self._known
        return self._describe(counted, rebuilt)

    def keep(self, *, rebuilt: bool) -> None:
        """Keeps what is known now, in case the models are gone when it is asked for."""
        self._known = self.facts(rebuilt=rebuilt)

    def forget(self) -> None:
        """Observes none of them any longer; how they were built stays known."""
        self._adapters = []
        self._trained.clear()
        self._any_trained, self._known = False, None

    def sources(self, ddps: Iterable[DDP]) -> dict[str, str | None]:
        """Returns which mechanism gives each figure; None where one of the models has none."""
        chosen, known = set(ddps), dict[str, str | None]()
        for adapter in self._adapters:
            if adapter.ddp not in chosen:
                continue
            for name, source in adapter.sources.items():
                known[name] = source if name not in known or known[name] == source else None
        return known

    def _describe(self, ddps: Mapping[int, DDP], rebuilt: bool) -> ModelFacts:
        reduced = self.reduced(ddps)
        first = next(iter(ddps.values()))
        described = (self._built[ddp].describe() for _, ddp in sorted(ddps.items()))
        return ModelFacts(
            elements=sum(p.numel() for p in reduced.values()),
            reduced=tuple(ParameterFacts(name, p.nbytes) for name, p in reduced.items()),
            bucket_bytes=bucket_bytes(ddps.values()) if rebuilt else None,
            ddps=tuple(facts for facts in described if facts is not None),
            sources=self.sources(ddps.values()),
            group_size=first.process_group.size(),
            backend=first.process_group._get_backend_name().lower(),
            device=next(first.parameters()).device,
        )


def bucket_bytes(ddps: Iterable[DDP]) -> tuple[int, ...] | None:
    """Returns the sizes of all buckets as DDP's logger has them; None where it has none.

    DDP could also make zeros in the shape of its buckets, as large as all gradients: too
    much memory for somebody else's training.
    """
    sizes: list[int] = []
    for ddp in ddps:
        logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        text = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes")
        if not isinstance(text, str) or not text.strip():
            return None
        sizes += [int(size) for size in text.split(",")]
    return tuple(sizes) or None
