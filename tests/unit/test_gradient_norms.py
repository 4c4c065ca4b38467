"""Norms of gradients: exact, of any dense type, and nothing changes by reading."""

import struct

import numpy as np
import pytest
import torch
from torch import nn

from ddp_profiler.analysis.noise_scale import noise_scale
from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.gradient_norms import GradientNorms, of_gradients, squared_norm
from ddp_profiler.measure.loop import LevelRun
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import LevelSettings, SpanKind, Variant
from ddp_profiler.workload import build
from ddp_profiler.workload.plant import Planter, parse_plants
from tests.integration.noise_model import truth
from tests.unit.span_columns import NULL

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (), (300, 401)], ids=str)
def test_squared_norm(dtype, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100
    tensor = values.to(dtype)
    exact = float(tensor.abs().double().square().sum())
    # 65,536 of |100| or more are above what 16 bits can hold.
    assert float(squared_norm(tensor)) == pytest.approx(exact, rel=1e-5)
    assert float(squared_norm(tensor.mT if tensor.dim() > 1 else tensor)) == pytest.approx(
        exact, rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 1023, 1024, 30_001, 3_000_001])
def test_millions_of_elements_are_added_up_well(count, dtype):
    tensor = torch.full((count,), 0.1, dtype=dtype)
    exact = count * float(tensor[0]) ** 2
    # All rounded alike: of elements that differ the sum is closer.
    assert float(squared_norm(tensor)) == pytest.approx(exact, rel=3e-6)


def test_what_is_no_number_and_what_is_not_dense():
    assert torch.isnan(squared_norm(torch.tensor([1.0, float("nan")])))
    with pytest.raises(TypeError):
        squared_norm(torch.eye(3).to_sparse())


class Read:
    """Norms whose points are kept as (kind, value, samples, bytes, index)."""

    def __init__(self):
        self.recorder = Recorder(HostTimeline(), lambda _: None)
        self.recorder.phase = SpanKind.BACKWARD
        self.norms = GradientNorms(self.recorder, 3)

    @property
    def points(self):
        return [
            (s[2], struct.unpack("<d", struct.pack("<q", s[8]))[0], s[7], s[6], s[3])
            for s in self.recorder._spans
        ]


def test_both_norms_of_all_buckets():
    read = Read()
    # As DDP hands them over at 2 ranks: halves.
    buckets = [torch.tensor([1.5, 2.0]), torch.tensor([0.5])]
    before = [bucket.clone() for bucket in buckets]
    for bucket in buckets:
        read.norms.hand_over(bucket, 2)
    assert all(torch.equal(a, b) for a, b in zip(buckets, before, strict=True))
    buckets[0].copy_(torch.tensor([1.0, 1.0]))
    buckets[1].fill_(2.0)
    read.norms.take(local_samples=8, reduced_samples=16)
    assert read.points == [
        (SpanKind.LOCAL_GRADIENT_NORM, 4 * (2.25 + 4 + 0.25), 8, 12, 3),
        (SpanKind.REDUCED_GRADIENT_NORM, 6.0, 16, 12, 3),
    ]
    # The next backward begins with nothing.
    read.norms.take()
    assert len(read.points) == 2


def test_a_scaled_loss_and_the_reduced_norm_alone():
    read = Read()
    read.norms.hand_over(torch.tensor([3.0, 4.0]), 1)
    read.norms.take(divisor=10.0, reads_local=False)
    assert read.points == [(SpanKind.REDUCED_GRADIENT_NORM, 0.25, None, 8, 3)]


def test_a_bucket_that_cannot_be_read_leaves_nothing():
    read = Read()
    read.norms.hand_over(torch.ones(2), 2)
    read.norms.hand_over(torch.eye(2).to_sparse(), 2)
    read.norms.take()
    assert read.points == []
    read.norms.hand_over(torch.ones(2), 1)
    read.norms.take()
    assert len(read.points) == 2


def test_zeros_that_are_handed_over_outside_backward_are_not_kept():
    """As a rank does that has ended under join, for as long as others train."""
    read = Read()
    read.recorder.phase = None
    read.norms.hand_over(torch.zeros(2), 2)
    read.recorder.phase = SpanKind.BACKWARD
    read.norms.take()
    assert read.points == []


def test_gradients_of_parameters():
    first, second, without = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 12.0])
    assert of_gradients([first, without, second]) == (169.0, 16)
    assert of_gradients([without]) == (0.0, 0)


# ----------------------------------------------------------------------------------------------
# The training loop of a study, in a group of one


@pytest.fixture
def trained(process_group):
    """Returns a function that trains blocks at dp = 1 and returns columns and weights of each."""

    def train(model, variants, *, accumulation=4, precision="fp32", plants=()):
        level, kept, weights = LevelSettings("dp1", 1, 8, accumulation, "packed", (0,)), [], []
        run = LevelRun(
            level,
            build(model, seed=0, micro_batch=8, data=None),
            Recorder(HostTimeline(), kept.append),
            torch.distributed.group.WORLD,
            0,
            torch.device("cpu"),
            bucket_cap_mb=0.001,
            precision=precision,
            seed=0,
            planter=Planter(parse_plants(plants), 0),
        )
        for block, variant in enumerate(variants):
            run.recorder.begin_block(0, 0, block, variant)
            run.run_block(6, variant)
            weights.append([p.detach().clone() for p in run.ddp.parameters()])
        run.close()
        columns = [
            {name: np.array([NULL if v is None else v for v in vs]) for name, vs in block.items()}
            for block in kept
        ]
        return level, columns, weights

    return train


MODEL = "tests.integration.noise_model:make"


@pytest.mark.parametrize("plants", [(), ("sync=always",)], ids=str)
def test_noise_block_of_a_study(trained, plants):
    variants = (Variant.WARMUP, Variant.PLAIN, Variant.INSTRUMENTED, Variant.NOISE, Variant.READY)
    level, blocks, weights = trained(MODEL, variants, plants=plants)
    for block, variant in zip(blocks, variants, strict=True):
        expected = 6 if variant is Variant.NOISE else 0
        for kind in (SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM):
            assert (block["kind"] == kind).sum() == expected
    # Parameters stay as they are.
    before, after = weights[2:4]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    found = noise_scale({0: blocks[3]}, 0, level, None)
    assert (found.small_batch, found.large_batch, found.steps) == (8, 32, 6)
    assert found.ci95[0] < truth() < found.ci95[1] < 3 * truth()


def test_a_scaled_loss_has_the_norms_of_one_that_is_not(trained):
    norms = {}
    for precision in ("fp32", "fp16"):
        variants = (Variant.NOISE,)
        _, (block,), _ = trained("mlp:width=32,depth=3", variants, precision=precision)
        for kind in (SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM):
            norms[precision, kind] = block["value"][block["kind"] == kind].view(np.float64)
    for kind in (SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM):
        assert norms["fp16", kind] == pytest.approx(norms["fp32", kind], rel=0.02)
