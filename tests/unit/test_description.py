"""What is described of a script's training, by an attachment made by hand."""

from types import SimpleNamespace

import pytest
import torch

from ddp_profiler.errors import UsageError
from ddp_profiler.measure.scripts.models import ModelFacts
from ddp_profiler.measure.topology import Topology
from ddp_profiler.observe.description import Description
from ddp_profiler.schema import DdpFacts, ParameterFacts
from tests.unit.ranks_as_threads import Board, Store


def description(ranks, known):
    """A rank of ``known`` ones whose DDP has so many."""
    ddp = DdpFacts(False, False, True, 0, False, ranks, "__main__")
    parameters = (ParameterFacts("weight", 24), ParameterFacts("bias", 8))
    models = ModelFacts(8, parameters, None, (ddp,), {}, ranks, "gloo", torch.device("cpu"))
    attachment = SimpleNamespace(
        facts=lambda rebuilt: models,
        models=SimpleNamespace(ever_trained={0}),
        tracker=SimpleNamespace(samples={2: 9}, micro_steps={1: 9}),
        recorder=SimpleNamespace(reduced_outside_bytes=0),
        loss_divisor=None,
        optimized=(),
    )
    # Not the first of its node, which has more to describe.
    topology = Topology(0, 1, known, known, launched=False)
    return Description(topology, Board(Store(), 0), attachment)


def test_the_level_is_that_of_the_ddp():
    found = description(2, known=2)
    found.update(final=False)
    level = found.level
    assert (level.dp, level.micro_batch, level.accumulation, level.ranks) == (2, 2, 1, (0, 1))
    assert found.facts.parameters == 8


def test_more_ranks_than_were_known_are_refused():
    """Figures would be those of this rank alone, and be shown as those of all."""
    found = description(2, known=1)
    with pytest.raises(UsageError) as caught:
        found.update(final=False)
    assert "DistributedDataParallel has 2 ranks" in caught.value.message
    assert "only 1 was known" in caught.value.message
    assert "after init_process_group" in caught.value.remedy
    assert (found.level, found.facts) == (None, None)
