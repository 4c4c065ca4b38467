"""A study of one rank with --kineto: when it traces, what it writes and what it says."""

import gc
from types import SimpleNamespace

import pytest
import torch

from ddp_profiler.config import StudyConfig
from ddp_profiler.measure import kineto
from ddp_profiler.measure.clock import monotonic_clock
from ddp_profiler.measure.session import Device, Session
from ddp_profiler.measure.study import Phase, Study
from ddp_profiler.measure.topology import plan_levels, read_topology
from ddp_profiler.report.progress import NoProgress
from ddp_profiler.schema import Variant
from ddp_profiler.trace.gather import read_ranks


@pytest.fixture
def studied(tmp_path):
    """Runs a study of two levels, each measured twice, and returns what came of it."""
    threads = torch.get_num_threads()
    session = Session(read_topology({}), Device(torch.device("cpu"), "gloo", 1), 60.0)
    # As the launch has it by now.
    session.gather_places("clock")

    def run(steps=2):
        config = StudyConfig(
            model="mlp:width=16,depth=2", accumulate=(1, 2), micro_batch=2, steps=1, warmup=2,
            repeat=2, allreduce_max_mb=0, kineto=steps,
        )  # fmt: skip
        levels = plan_levels(config, 1)
        spans, said = [], []
        facts = Study(
            config,
            levels,
            session,
            spans.append,
            NoProgress(),
            Phase(),
            monotonic_clock,
            SimpleNamespace(needed=False),
            lambda *_: None,
            trace_file=lambda level: tmp_path / level.id / "rank-00000.json.gz",
            say=said.append,
        ).run()
        blocks = [(block["level"][0], block["variant"][0]) for block in spans]
        last = {block["level"][0]: max(block["step"]) for block in spans[-2:]}
        return SimpleNamespace(levels=levels, facts=facts, blocks=blocks, last=last, said=said)

    yield run
    torch.set_num_threads(threads)
    gc.collect()
    torch.distributed.destroy_process_group()


def test_levels_are_traced_once_each_after_all_are_measured(studied, tmp_path):
    found = studied()
    traced = [level for level, variant in found.blocks if variant == Variant.KINETO]
    assert traced == [0, 1]
    assert [variant for _, variant in found.blocks[-2:]] == [Variant.KINETO] * 2
    # 2 steps of warm-up and 2 in the trace, counted from 0.
    assert found.last == {0: 3, 1: 3}
    assert found.said == []
    for level in found.levels:
        (split,) = read_ranks([tmp_path / level.id]).ranks
        assert [step.step.number for step in split.steps] == [2, 3]


def test_without_the_option_nothing_is_traced(studied, tmp_path):
    found = studied(steps=0)
    assert Variant.KINETO not in {variant for _, variant in found.blocks}
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_said_once_and_changes_nothing_else(studied, tmp_path, monkeypatch):
    def broken(**_):
        raise RuntimeError("planted")

    monkeypatch.setattr(kineto, "profile", broken)
    found = studied()
    assert len(found.facts) == 2
    assert found.last == {0: 3, 1: 3}
    (line,) = found.said
    assert "rank 0 at level" in line
    assert "RuntimeError: planted" in line
    assert list(tmp_path.rglob("*.gz")) == []
