"""What a script trains with that builds no DDP, and what it is told."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizers

from ddp_profiler.measure.scripts import other_training
from ddp_profiler.measure.scripts.other_training import OtherTraining, describe


@pytest.fixture
def seen():
    one, init = OtherTraining(), nn.DataParallel.__init__
    one.install()
    yield one
    one.uninstall()
    assert not optimizers._global_optimizer_post_hooks
    assert nn.DataParallel.__init__ is init


def train(module, steps=3, step=lambda optimizer: optimizer.step()):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        module(torch.ones(2, 3)).sum().backward()
        step(optimizer)


def test_nothing(seen):
    nn.Linear(3, 2)(torch.ones(2, 3))
    assert seen.kind is None
    assert "no optimizer of torch has stepped" in describe(seen, 1)


def test_plain_training(seen):
    train(nn.Linear(3, 2), steps=1)
    train(nn.Linear(3, 2), steps=2)
    assert (seen.kind, dict(seen.steps)) == (other_training.PLAIN, {"SGD": 3})
    one, other = describe(seen, 1).splitlines()
    assert one.endswith("it trains without anything of the kind (3 steps of SGD).")
    assert other.endswith("--nproc_per_node=2 -m ddp_profiler.run --model package.module:factory")
    assert "(3 steps of SGD, on each of 4 ranks)" in describe(seen, 4)
    assert "--nproc_per_node=4 " in describe(seen, 4)


def test_data_parallel(seen):
    train(nn.DataParallel(nn.Linear(3, 2)))
    assert seen.kind == other_training.DATA_PARALLEL
    assert "it trains with nn.DataParallel (3 steps of SGD)" in describe(seen, 1)
    assert "--model package.module:factory" in describe(seen, 1)


@pytest.mark.filterwarnings("ignore")
def test_sharded_training(seen, process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_module, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    spread = {"input_fn": lambda _, inputs, mesh: tuple(distribute_tensor(x, mesh) for x in inputs)}
    train(distribute_module(nn.Linear(3, 2), mesh, **spread))
    assert seen.kind == other_training.SHARDED
    for original in (False, True):
        found = OtherTraining()
        found.install()
        cpu = torch.device("cpu")
        train(
            FullyShardedDataParallel(nn.Linear(3, 2), device_id=cpu, use_orig_params=original),
            steps=1,
        )
        found.uninstall()
        assert found.kind == other_training.FSDP1
    found = OtherTraining()
    found.install()
    train(fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), mesh=mesh))
    found.uninstall()
    assert found.kind == other_training.FSDP2
    text = describe(found, 2)
    assert "it trains with fully_shard (FSDP2) (3 steps of SGD, on each of 2 ranks)" in text
    assert text.endswith("A trace of torch.profiler shows its collectives beside its computation.")
    assert "torchrun" not in text


def test_libraries_that_reduce_by_themselves(seen, monkeypatch):
    train(nn.Linear(3, 2))
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    assert seen.kind == "DeepSpeed"
    assert "it trains with DeepSpeed (3 steps of SGD), which is not split" in describe(seen, 1)


def test_compiled_optimizers_train_alike(seen):
    """Counting must not change what is compiled, step by step."""
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    train(
        nn.Linear(3, 2),
        steps=12,
        step=lambda optimizer: torch.compile(optimizer.step, backend=backend)(),
    )
    seen.uninstall()
    counted, compiled[:] = len(compiled), []
    torch._dynamo.reset()
    train(
        nn.Linear(3, 2),
        steps=12,
        step=lambda optimizer: torch.compile(optimizer.step, backend=backend)(),
    )
    assert counted == len(compiled)


def test_what_fails_is_dropped(seen, monkeypatch):
    def planted(_):
        raise RuntimeError("planted")

    monkeypatch.setattr(other_training, "_kinds_of", planted)
    train(nn.Linear(3, 2))
    assert not optimizers._global_optimizer_post_hooks
