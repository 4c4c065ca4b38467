"""Digests of gradients: equal bits have equal digests wherever they lie in memory."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.digests import Digests, digest
from ddp_profiler.schema import OptimizedParameter, ParameterPlace, SpanKind

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool)


def value(tensor, like=None):
    return int(digest(tensor, like))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1001])
def test_place_in_memory_does_not_matter(dtype, count):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(3)).to(dtype)
    room = torch.zeros(count + 5, dtype=dtype)
    for offset in range(4):
        moved = room[offset : offset + count]
        moved.copy_(tensor)
        assert value(moved) == value(tensor)


@pytest.mark.parametrize("dtype", DTYPES[:5], ids=str)
def test_a_changed_bit_is_seen(dtype):
    tensor = torch.ones(1001, dtype=dtype)
    for place in (0, 1, 500, 1000):
        other = tensor.clone()
        other[place] = -1
        assert value(other) != value(tensor)


def test_not_a_number_is_a_value():
    tensor = torch.tensor([1.0, float("nan"), float("inf")])
    assert value(tensor) == value(tensor.clone())
    assert value(tensor) != value(torch.tensor([1.0, 2.0, float("inf")]))


def test_the_layout_of_the_parameter_counts():
    parameter = torch.randn(4, 3, 5, 5)
    gradient = torch.randn(4, 3, 5, 5)
    channels = gradient.contiguous(memory_format=torch.channels_last)
    assert value(channels, parameter) == value(gradient, parameter)
    like = parameter.contiguous(memory_format=torch.channels_last)
    assert value(channels, like) == value(gradient, like)


def test_what_is_not_contiguous_is_read():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert value(tensor[:, ::2]) == value(tensor[:, ::2].contiguous())
    assert value(torch.ones(1).expand(8)) == value(torch.ones(8))


def test_sparse_and_scalar():
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,))
    assert value(sparse) == value(torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,)))
    assert value(sparse) != value(torch.sparse_coo_tensor([[0, 1]], [1.0, 3.0], (4,)))
    assert value(torch.tensor(3, dtype=torch.int64)) == 3


def test_an_unknown_kind_of_tensor_has_none():
    class Part(torch.Tensor):
        pass

    assert digest(torch.ones(3).as_subclass(Part)) is None


class Kept(list):
    """Takes spans as rows."""

    def __call__(self, columns):
        names = list(columns)
        self += [dict(zip(names, v, strict=True)) for v in zip(*columns.values(), strict=True)]

    def points(self, kind):
        rows = [row for row in self if row["kind"] == kind]
        return [(row["step"], row["index"], row["value"]) for row in rows]


@pytest.fixture
def ddp(process_group, monkeypatch):
    model = DDP(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    # Digests are of interest where there are other ranks.
    monkeypatch.setattr(model, "process_group", type("Two", (), {"size": lambda self: 2})())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    return model


def taken(ddp, optimizers, warmup, steps):
    rows = Kept()
    recorder = Recorder(HostTimeline(), rows)
    digests = Digests(
        recorder, warmup, lambda: {0: ddp}, lambda: dict(ddp.module.named_parameters())
    )
    for step in range(steps):
        recorder.begin_micro_step(step, 0)
        for optimizer in optimizers:
            if digests.wanted(step):
                digests.take(optimizer, step)
    recorder.flush()
    return rows, digests


@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, []), (1, [0]), (2, [0, 1]), (3, [1, 2]), (9, [1, 8])]
)
def test_two_steps_of_the_warmup(ddp, warmup, steps):
    rows, _ = taken(ddp, [torch.optim.SGD(ddp.parameters(), lr=0.1)], warmup, 12)
    assert [step for step, *_ in rows.points(SpanKind.BUFFER_DIGEST)] == steps
    assert [step for step, *_ in rows.points(SpanKind.GRADIENT_DIGEST)] == [
        step for step in steps for _ in range(4)
    ]


def test_several_optimizers_and_a_parameter_outside(ddp):
    own = nn.Parameter(torch.ones(2))
    ddp.module[0].weight.grad = torch.ones(2, 3)
    own.grad = torch.full((2,), 2.0)
    parameters = list(ddp.parameters())
    first = torch.optim.SGD([parameters[3], own], lr=0.1)
    second = torch.optim.SGD([*parameters], lr=0.1)
    rows, digests = taken(ddp, [first, second], 2, 1)
    found = rows.points(SpanKind.GRADIENT_DIGEST)
    # Each once, by the ordinal of the model's; what is outside comes after them.
    assert [index for _, index, _ in found] == [3, 4, 0, 1, 2]
    ones = value(ddp.module[0].weight.grad)
    assert [v for *_, v in found] == [0, value(own.grad), ones, 0, 0]
    assert [row["bytes"] for row in rows if row["kind"] == SpanKind.GRADIENT_DIGEST][1] == 8
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert digests.parameters == (
        *(OptimizedParameter(name, ParameterPlace.REDUCED, 0) for name in names),
        OptimizedParameter("SGD group 0 parameter 1 (2)", ParameterPlace.OUTSIDE),
    )


def test_models_are_walked_as_often_however_many_parameters_they_have(process_group, monkeypatch):
    monkeypatch.setattr(Digests, "_has_peers", lambda _: True)
    walks = []
    named_parameters = nn.Module.named_parameters

    def counted(self, *args, **keywords):
        walks.append(self)
        return named_parameters(self, *args, **keywords)

    counts = []
    for layers in (2, 60):
        model = DDP(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))
        outside = [nn.Parameter(torch.ones(2)) for _ in range(layers)]
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in (*model.parameters(), *outside)]
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "named_parameters", counted)
            rows, _ = taken(model, optimizers, 2, 2)
        assert len(rows.points(SpanKind.GRADIENT_DIGEST)) == 2 * 3 * layers
        counts.append(len(walks))
        walks.clear()
    assert counts[0] == counts[1]


def test_another_parameter_in_the_place_of_one_that_is_gone(ddp):
    """It may have its id, never its ordinal."""
    recorder = Recorder(HostTimeline(), Kept())
    digests = Digests(recorder, 2, lambda: {0: ddp}, lambda: dict(ddp.module.named_parameters()))
    for step in range(2):
        recorder.begin_micro_step(step, 0)
        own = nn.Parameter(torch.ones(2))
        digests.take(torch.optim.SGD([own], lr=0.1), step)
        number = id(own)
        gone = weakref.ref(own)
        del own
        assert gone() is None
        # As the next one may do by chance.
        again = nn.Parameter(torch.ones(2))
        digests._ordinals[id(again)] = digests._ordinals[number]
        assert digests._known(again) is None
    assert [parameter.place for parameter in digests.parameters[4:]] == [ParameterPlace.OUTSIDE] * 2


def test_a_step_without_optimizer_is_made_up_for(ddp):
    rows = Kept()
    recorder = Recorder(HostTimeline(), rows)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    digests = Digests(recorder, 5, lambda: {0: ddp}, lambda: dict(ddp.module.named_parameters()))
    for step in (0, 3, 4, 5, 6):
        recorder.begin_micro_step(step, 0)
        if digests.wanted(step):
            digests.take(sgd, step)
    recorder.flush()
    assert [step for step, *_ in rows.points(SpanKind.BUFFER_DIGEST)] == [3, 4]
