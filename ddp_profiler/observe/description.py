"""Describes what a script turned out to do: its one level, and the ranks that trained."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import torch

from ddp_profiler.batch import by_value, unequal
from ddp_profiler.errors import UsageError
from ddp_profiler.measure import environment, kernel
from ddp_profiler.measure.scripts.attachment import Attachment
from ddp_profiler.measure.scripts.board import ScriptBoard
from ddp_profiler.measure.scripts.steps import typical
from ddp_profiler.measure.topology import Topology
from ddp_profiler.schema import (
    LevelFacts,
    LevelSettings,
    RankFeed,
    RankPlace,
)

LEVEL = "script"
"""The id of the only level of such a run."""


class Description:
    """What is known of the training so far: by what this rank has seen, and others have said.

    Args:
        topology: This rank's place.
        board: Where ranks tell each other what they are.
        attachment: What is observed on this rank.

    Attributes:
        level: The level; None before anything is known.
        facts: The same of what belongs to it.
    """

    def __init__(self, topology: Topology, board: ScriptBoard, attachment: Attachment) -> None:
        self.level: LevelSettings | None = None
        self.facts: LevelFacts | None = None
        self._topology = topology
        self._board = board
        self._attachment = attachment
        self._node_described = False
        self._known_places: tuple[RankPlace, ...] = ()

    def publish_place(self, device: torch.device) -> None:
        """Makes known where this rank trains."""
        place = RankPlace(
            rank=self._topology.rank,
            local_rank=self._topology.local_rank,
            node=0,
            hostname=socket.gethostname(),
            clock_domain=kernel.shared("time"),
            device=str(device),
            pid=os.getpid(),
        )
        self._board.publish(f"place/{place.rank}", place)

    def publish_feed(self) -> None:
        """Makes known what feeds training here: before ranks of unequal loaders can hang."""
        rank, feed = self._topology.rank, self._attachment.feed
        known = RankFeed(rank, tuple(feed.loaders), tuple(feed.digests), feed.joins)
        self._board.publish(f"feed/{rank}", known)

    def unequal_epochs(self) -> str:
        """Says that ranks will part at the end of an epoch; empty where they will not."""
        feeds = [feed for feed in self._feeds() if feed.loaders and not feed.joins]
        counts = unequal({feed.rank: feed.loaders[0].batches for feed in feeds})
        if not counts:
            return ""
        return (
            f"micro-batches of an epoch: {by_value(counts)}. At its end the ranks with more "
            "will wait without end for the others, unless a number of steps ends it before."
        )

    def update(self, *, final: bool) -> None:
        """Describes what the script turned out to do, by what this rank has seen.

        Where no model was called since the last time, nothing changes.

        Args:
            final: Whether DDP has built its buckets for good: not before the second step.

        Raises:
            UsageError: DDP has more ranks than were known when observing began.
        """
        attachment, tracker = self._attachment, self._attachment.tracker
        models, before = attachment.facts(rebuilt=final), self.facts
        if models is None:
            return
        ddps = models.ddps
        if before is not None:
            # The record has spans of those that were trained before as well.
            known = attachment.models.ever_trained - {ddp.number for ddp in ddps}
            others = (ddp for ddp in before.ddps if ddp.number in known)
            ddps = tuple(sorted((*others, *ddps), key=lambda ddp: ddp.number))
        if models.group_size > self._topology.world_size:
            raise UsageError(
                f"DistributedDataParallel has {models.group_size} ranks, and observing "
                f"began when only {self._topology.world_size} was known.",
                "Begin to observe after init_process_group, or start the ranks with torchrun.",
            )
        self.facts = LevelFacts(
            id=LEVEL,
            parameters=models.elements,
            gradient_bytes=sum(parameter.nbytes for parameter in models.reduced),
            num_buckets=len(models.bucket_bytes) if models.bucket_bytes else None,
            bucket_bytes=models.bucket_bytes,
            sources=models.sources,
            reduced=models.reduced,
            loss_divisor=attachment.loss_divisor,
            built_by=models.ddps[0].built_by,
            ddps=ddps,
            optimized=attachment.optimized,
            reduced_outside_bytes=attachment.recorder.reduced_outside_bytes,
        )
        self.level = LevelSettings(
            id=LEVEL,
            dp=models.group_size,
            micro_batch=typical(tracker.samples, 0),
            accumulation=typical(tracker.micro_steps, 1),
            placement="packed",
            ranks=tuple(range(self._topology.world_size)),
        )
        if self._topology.local_rank == 0 and not self._node_described:
            self._node_described = True
            own = environment.describe(
                models.device,
                torch.get_num_threads(),
                self._topology.local_world_size,
                models.backend,
            )
            self._board.publish(f"environment/{self._topology.rank}", own)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the run's description, as far as they are known."""
        if self.level is None or self.facts is None:
            return {}
        places = self._places()
        return {
            "levels": (self.level,),
            "facts": (replace(self.facts, feeds=self._feeds()),),
            "ranks": places,
            "environment": self._environments(places),
        }

    def _environments(self, places: tuple[RankPlace, ...]) -> dict[str, dict[str, Any]]:
        """Returns what the first rank of each node has said of it, by node."""
        found: dict[str, dict[str, Any]] = {}
        for place in places:
            own = self._board.find(f"environment/{place.rank}") if place.local_rank == 0 else None
            if own is not None:
                found.setdefault(str(place.node), own)
        return found

    def _feeds(self) -> tuple[RankFeed, ...]:
        """Returns what feeds training on the ranks that have said so."""
        ranks = range(self._topology.world_size)
        found = [self._board.find(f"feed/{rank}", RankFeed) for rank in ranks]
        return tuple(feed for feed in found if feed is not None)

    def _places(self) -> tuple[RankPlace, ...]:
        """Returns where the ranks run that have built a model so far."""
        if len(self._known_places) == self._topology.world_size:
            return self._known_places
        found = []
        nodes: dict[str, int] = {}
        for rank in range(self._topology.world_size):
            place: RankPlace | None = self._board.find(f"place/{rank}", RankPlace)
            if place is not None:
                node = nodes.setdefault(place.hostname, len(nodes))
                found.append(replace(place, node=node))
        self._known_places = tuple(found)
        return self._known_places
