"""What a script trains with that never builds DistributedDataParallel.

Steps of optimizers are counted until the first DDP is built; how the model is spread is told
from the optimizer's parameters, whatever way the script came by the function that sharded them.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

PLAIN = "plain training"
DATA_PARALLEL = "nn.DataParallel"
FSDP1 = "FullyShardedDataParallel"
FSDP2 = "fully_shard (FSDP2)"
SHARDED = "sharded parameters (DTensor)"

_LIBRARIES = {"deepspeed": "DeepSpeed", "horovod.torch": "Horovod"}
_PARALLEL = (FSDP1, FSDP2, SHARDED, DATA_PARALLEL)


class OtherTraining:
    """Notes how a script trains as long as it has built no DDP.

    What fails in here is dropped: it is about one message only.

    Attributes:
        steps: Steps of optimizers on this rank, by the optimizer's class.
        on_thread: Whether a DDP was built or called on another thread than the observed one.
    """

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.on_thread = False
        self._kinds: set[str] = set()
        self._take_out: list[Callable[[], None]] = []

    def install(self) -> None:
        """Starts to look."""
        self._take_out.append(register_optimizer_step_post_hook(self._stepped).remove)
        original = nn.DataParallel.__init__

        @functools.wraps(original)
        def ours(*args: Any, **keywords: Any) -> None:
            original(*args, **keywords)
            self._kinds.add(DATA_PARALLEL)

        nn.DataParallel.__init__ = ours  # type: ignore[method-assign]

        def restore() -> None:
            # Whoever has put something around ours meanwhile keeps it.
            if nn.DataParallel.__init__ is ours:
                nn.DataParallel.__init__ = original  # type: ignore[method-assign]

        self._take_out.append(restore)

    def uninstall(self) -> None:
        """Takes all of it out of torch; twice is once."""
        while self._take_out:
            self._take_out.pop()()

    @property
    def kind(self) -> str | None:
        """How the script trains, in words; None if no optimizer has stepped."""
        for kind in _PARALLEL:
            if kind in self._kinds:
                return kind
        for module, name in _LIBRARIES.items():
            if module in sys.modules:
                return name
        return PLAIN if self.steps else None

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        # In compiled code it would be traced, and change what is compiled.
        if torch.compiler.is_compiling():
            return
        name = type(optimizer).__name__
        if name not in self.steps:
            try:
                self._kinds |= _kinds_of(optimizer)
            except Exception:
                self.uninstall()
        self.steps[name] += 1


def _kinds_of(optimizer: Optimizer) -> set[str]:
    """Returns by what, if anything, an optimizer's parameters are sharded."""
    kinds = set()
    tensors = sys.modules.get("torch.distributed.tensor")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if getattr(parameter, "_fsdp_flattened", False):
                kinds.add(FSDP1)
            elif tensors is not None and isinstance(parameter, tensors.DTensor):
                # Tensor parallelism has them as well.
                kinds.add(FSDP2 if _has_fsdp2() else SHARDED)
    return kinds


def _has_fsdp2() -> bool:
    """Tells whether fully_shard manages any module: they are of a class of its own."""
    states = sys.modules.get("torch.distributed._composable_state")
    managed = getattr(states, "_module_state_mapping", ())
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return base is not None and any(isinstance(module, base) for module in list(managed))


def describe(seen: OtherTraining, world_size: int) -> str:
    """Returns what a script did that built no DDP, and which command would serve, in two lines.

    Args:
        seen: What was seen on this rank.
        world_size: Number of ranks.
    """
    if seen.on_thread:
        return (
            "DistributedDataParallel trains on another thread than the one that runs the script; "
            "that is not observed.\nTrain on the main thread to have it observed."
        )
    start = "DistributedDataParallel was never built or called, so there is nothing to split: "
    kind = seen.kind
    if kind is None:
        return (
            f"{start}no optimizer of torch has stepped in this process either.\n"
            "Training in processes that the script itself starts is not seen: start the script "
            "that trains with torchrun."
        )
    counts = [
        f"{count} step{'s' if count != 1 else ''} of {name}"
        for name, count in seen.steps.most_common()
    ]
    on = [f"on each of {world_size} ranks"] if world_size > 1 else []
    found = f" ({', '.join([*counts, *on])})" if counts else ""
    if kind in (PLAIN, DATA_PARALLEL):
        with_what = "without anything of the kind" if kind == PLAIN else f"with {kind}"
        return (
            f"{start}it trains {with_what}{found}.\n"
            "Wrap the model in DistributedDataParallel and start it again with torchrun; or "
            f"measure the model itself: torchrun --standalone --nproc_per_node={max(2, world_size)}"
            " -m ddp_profiler.run --model package.module:factory"
        )
    return (
        f"{start}it trains with {kind}{found}, which is not split here.\n"
        "A trace of torch.profiler shows its collectives beside its computation."
    )
