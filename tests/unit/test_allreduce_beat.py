"""Ranks that wait for a level hear of it while its AllReduces are timed."""

import pytest
import torch
import torch.distributed as dist

from ddp_profiler.measure import allreduce
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.study import make_timeline
from ddp_profiler.schema import Variant


@pytest.fixture
def isolated(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    beats = []
    recorder = Recorder(make_timeline(torch.device("cpu")), lambda _: None)
    recorder.begin_block(0, 0, 0, Variant.ALLREDUCE)
    own = allreduce.IsolatedAllReduce(
        recorder, None, torch.device("cpu"), lambda: beats.append(True)
    )
    return own, beats


def test_between_sizes(isolated):
    own, beats = isolated
    own.sweep(256 * 1024)
    assert len(beats) == 4


def test_between_rounds_of_buckets(isolated):
    own, beats = isolated
    own.buckets((4096, 4096))
    assert len(beats) >= 5
