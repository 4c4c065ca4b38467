"""Looks for code of the profiler in torch while it is observed and afterwards."""

import gc
import types

import torch
import torch.distributed as dist
import train
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers


def places():
    """All functions of torch that a script of this kind goes through, by name."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    owners = (DDP, torch.autograd, optimizers.Optimizer, torch.amp.GradScaler, iterator)
    owners += (torch.nn.utils, torch.nn.utils.clip_grad, torch, dist, dist.Work)
    for owner in owners:
        for name, value in vars(owner).items():
            if type(value) is types.FunctionType:
                yield f"{getattr(owner, '__name__', owner)}.{name}", value


def found():
    ours = {name for name, f in places() if "ddp_profiler" in f.__code__.co_filename}
    hooks = [*optimizers._global_optimizer_pre_hooks.values()]
    hooks += [*optimizers._global_optimizer_post_hooks.values()]
    ours |= {f"hook {h.__qualname__}" for h in hooks}
    kinds = {type(o).__name__ for o in gc.get_objects()}
    return ours | (kinds & {"_ObservedGroup", "DdpAdapter"})


torch.set_num_threads(1)
dist.init_process_group("gloo")
seen = []
model = DDP(train.mlp())
train.simple_loop(model, after=lambda step: seen.append(found()))
print("first step:", sorted(seen[0]))
print("last step:", sorted(seen[-1]))
dist.destroy_process_group()
