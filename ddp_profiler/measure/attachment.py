"""Attaches to a training script that knows nothing of us, and lets go of it again.

What is observed is what every such script has to call: DistributedDataParallel, backward,
``Optimizer.step`` and ``zero_grad``, the DataLoader's iterator, GradScaler, gradient clipping,
``torch.save``. Each is replaced by a function that calls the original one with the same
arguments and passes on what it returns or raises. Between blocks and after the last one nothing
of ours is left in DDP. If anything of ours fails, everything is taken out, it is said once, and
training goes on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_profiler.measure import backward, ddp_adapter
from ddp_profiler.measure.backward import BackwardWatch
from ddp_profiler.measure.batches import number_of_samples
from ddp_profiler.measure.construction import Construction, building_package
from ddp_profiler.measure.digests import Digests
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.steps import StepTracker
from ddp_profiler.measure.untraced import skip_frame
from ddp_profiler.schema import (
    DdpFacts,
    Interruption,
    OptimizedParameter,
    SpanKind,
    Variant,
)

_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_SAVERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("torch.distributed.checkpoint", "save"),
)


class Attachment:
    """Observes one process's training.

    Observing begins with the first DistributedDataParallel that is built: only then is it known
    on which device the script trains.

    Args:
        make_recorder: Makes what takes the marks of training on a device.
        plan: Variants and numbers of steps, one block after the other.
        batch_dim: The dimension of forward's first tensor that counts samples.
        on_failure: Told if something of ours has failed; nothing is left installed then.
        on_block: Told, between two steps, the variant of the block that begins; None at the end
            of the plan, when nothing is left installed.
    """

    def __init__(
        self,
        make_recorder: Callable[[torch.device], Recorder],
        plan: Sequence[tuple[Variant, int]],
        *,
        batch_dim: int = 0,
        on_failure: Callable[[Exception], None],
        on_block: Callable[[Variant | None], None] = lambda _: None,
    ) -> None:
        self.ddps: list[DDP] = []
        self.built = False
        """Whether the script has built any."""
        self.started = False
        self.recorder: Recorder
        self.tracker: StepTracker
        self._watch: BackwardWatch
        self._digests: Digests
        self._make_recorder = make_recorder
        self._plan = plan
        self._batch_dim = batch_dim
        self._on_failure = on_failure
        self._on_block = on_block
        self._adapters: list[ddp_adapter.DdpAdapter] = []
        self._constructions: list[Construction] = []
        self._thread = threading.get_ident()
        self._depth: dict[str, int] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._handles: list[Any] = []
        self._stepping: list[tuple[Any, int]] = []
        self._warmup = _leading(plan, Variant.WARMUP)
        self._user_hooks: Any = None
        self.installed = False

    # -- putting in and taking out ------------------------------------------------------------

    def install(self) -> None:
        """Looks out for models; call it on the thread that trains, before it makes them."""
        self.installed = True
        self._user_hooks = ddp_adapter.installed()
        self._user_hooks.__enter__()
        self._replace(DDP, "__init__", self._on_init)

    def _start(self, device: torch.device) -> None:
        """Begins to observe training on a device."""
        self.recorder = self._make_recorder(device)
        self._watch = BackwardWatch(self.recorder)
        self.tracker = StepTracker(self.recorder, self._plan, self._switch)
        self._digests = Digests(self.recorder, self._warmup, self.ddps, self.reduced)
        self.started = True
        self._replace(DDP, "forward", self._on_forward)
        self._replace(torch.autograd, "backward", self._on_backward)
        self._replace(Optimizer, "zero_grad", self._of_optimizer("zero"))
        self._replace(torch.amp.GradScaler, "step", self._of_optimizer("scaler", ends_step=True))
        self._replace(torch.amp.GradScaler, "unscale_", self._of_optimizer("unscale"))
        for name in _CLIPPING:
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                self._replace(module, name, self._of_optimizer("clip"))
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        self._replace(iterator, "__next__", self._on_fetch)
        compiled = sys.modules.get("torch._dynamo.eval_frame")
        if compiled is not None:
            self._replace(compiled.OptimizedModule, "__call__", self._on_compiled)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def uninstall(self) -> None:
        """Takes everything of ours out of torch and of the models; twice is once."""
        if not self.installed:
            return
        self.installed = False
        for owner, name, original, ours in reversed(self._replaced):
            # Whoever has put something around ours meanwhile keeps it; ours only passes on then.
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        self._replaced.clear()
        for handle in self._handles:
            handle.remove()
        for adapter in self._adapters:
            adapter.detach()
        if self._user_hooks is not None:
            self._user_hooks.__exit__(None, None, None)

    def _replace(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        """Puts a function in the place of another: ``act(original, args, keywords)``."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def ours(*args: Any, **keywords: Any) -> Any:
            # Dynamo sees nothing but the call that it knows how to compile.
            if (
                torch.compiler.is_compiling()
                or not self.installed
                or threading.get_ident() != self._thread
            ):
                return original(*args, **keywords)
            return act(original, args, keywords)

        skip_frame(ours)
        setattr(owner, name, ours)
        self._replaced.append((owner, name, original, ours))

    def _guard(self, step: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Does something of ours; if it fails, steps aside for good."""
        try:
            return step(*arguments, **keywords)
        except Exception as error:
            try:
                self.uninstall()
            finally:
                self._on_failure(error)
            return None

    def _switch(self, variant: Variant | None) -> None:
        """Attaches to DDP or detaches from it, between two steps."""
        if variant is None:
            self.uninstall()
        else:
            self._replace_savers()
            for adapter in self._adapters:
                if variant is Variant.PLAIN:
                    adapter.detach()
                else:
                    adapter.attach()
        self._on_block(variant)

    def _replace_savers(self) -> None:
        if not self.installed:
            return
        known = {(id(owner), name) for owner, name, _, _ in self._replaced}
        for module_name, name in _SAVERS:
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, name) and (id(module), name) not in known:
                self._replace(module, name, self._on_save)

    # -- what a script does -------------------------------------------------------------------

    def _outermost(self, kind: str, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Calls; tells whether it was not inside another call of the same kind."""
        depth = self._depth.get(kind, 0)
        self._depth[kind] = depth + 1
        try:
            return depth == 0, call()
        finally:
            self._depth[kind] = depth

    def _on_init(self, original: Any, args: Any, keywords: Any) -> Any:
        built_by = self._guard(building_package)
        result = original(*args, **keywords)
        self._guard(self._adopt, args[0], built_by or "")
        return result

    def _adopt(self, ddp: DDP, built_by: str) -> None:
        self.built = True
        self.ddps.append(ddp)
        self._constructions.append(Construction(ddp, built_by))
        if not self.started:
            self._start(next(ddp.parameters()).device)
        self._replace_savers()
        adapter = ddp_adapter.DdpAdapter(ddp, self.recorder, number=len(self._adapters))
        self._adapters.append(adapter)
        if self.tracker.observing:
            adapter.attach()

    def _on_forward(self, original: Any, args: Any, keywords: Any) -> Any:
        return self._call(original, args, keywords, inputs=(args[1:], keywords))

    def _on_compiled(self, original: Any, args: Any, keywords: Any) -> Any:
        if not isinstance(getattr(args[0], "_orig_mod", None), DDP):
            return original(*args, **keywords)
        return self._call(original, args, keywords, inputs=(args[1:], keywords))

    def _call(self, original: Any, args: Any, keywords: Any, inputs: Any) -> Any:
        if self._depth.get("forward"):
            return original(*args, **keywords)
        evaluates = not torch.is_grad_enabled()
        begin = self._guard(self._begin_call, evaluates)
        try:
            _, result = self._outermost("forward", lambda: original(*args, **keywords))
        finally:
            self.recorder.phase = None
        if begin is not None:
            self._guard(self._end_call, evaluates, begin, inputs)
        return result

    def _begin_call(self, evaluates: bool) -> Any:
        self.tracker.act()
        if not evaluates:
            self.tracker.begins_call()
            if self.tracker.observing:
                self.recorder.phase = SpanKind.FORWARD
        return self.recorder.mark()

    def _end_call(self, evaluates: bool, begin: Any, inputs: Any) -> None:
        end = self.recorder.mark()
        if evaluates:
            self.tracker.interrupted(Interruption.EVALUATION, begin, end)
        else:
            samples = number_of_samples(inputs, self._batch_dim)
            self.tracker.called(begin, end, samples)

    def _on_backward(self, original: Any, args: Any, keywords: Any) -> Any:
        if self._depth.get("backward"):
            return original(*args, **keywords)
        begun = self._guard(self._begin_backward, args, keywords)
        try:
            _, result = self._outermost("backward", lambda: original(*args, **keywords))
        finally:
            self.recorder.phase = None
            if begun is not None and begun[1] is not None:
                begun[1].remove()
        if begun is not None:
            self._guard(self._end_backward, begun[0])
        return result

    def _begin_backward(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        self.tracker.act()
        self.tracker.begins_backward()
        handle = None
        if self.tracker.observing:
            root = args[0] if args else keywords.get("tensors")
            if not isinstance(root, Tensor) and root:
                root = next(iter(root))
            if isinstance(root, Tensor) and root.requires_grad:
                handle = self._watch.watch(root)
            self.recorder.phase = SpanKind.BACKWARD
        return self.recorder.mark(), handle

    def _end_backward(self, begin: Any) -> None:
        self.tracker.went_back(begin, self.recorder.mark())

    def _on_fetch(self, original: Any, args: Any, keywords: Any) -> Any:
        begin = self._guard(self._begin_act)
        outermost, batch = self._outermost("fetch", lambda: original(*args, **keywords))
        if outermost and begin is not None:
            self._guard(lambda: self.tracker.fetched(begin, self.recorder.mark()))
        return batch

    def _begin_act(self) -> Any:
        self.tracker.act()
        return self.recorder.mark()

    def _before_step(self, optimizer: Any, args: Any, keywords: Any) -> None:
        if threading.get_ident() == self._thread:
            if not _has_closure(args, keywords):
                self._guard(self._digest, optimizer)
            begun = self._guard(self.tracker.begins_optimizer)
            if begun is not None:
                self._stepping.append(begun)

    def _after_step(self, optimizer: Any, args: Any, keywords: Any) -> None:
        if threading.get_ident() == self._thread and self._stepping:
            begun = self._stepping.pop()
            if _has_closure(args, keywords):
                # The gradients were made inside.
                self._guard(self._digest, optimizer)
            if not self._depth.get("scaler"):
                self._guard(self._end_optimizer, begun, ends_step=True)

    def _digest(self, optimizer: Any) -> None:
        if not self.tracker.done and self._digests.wanted(self.tracker.step):
            self._digests.take(optimizer, self.tracker.step)

    def _end_optimizer(self, begun: tuple[Any, int], *, ends_step: bool) -> None:
        self.tracker.optimized(begun, self.recorder.mark(), ends_step=ends_step)

    def _of_optimizer(self, kind: str, *, ends_step: bool = False) -> Callable[..., Any]:
        """Times what belongs to the optimizer.

        A scaler's step ends a step also where it skips the optimizer's.
        """

        def act(original: Any, args: Any, keywords: Any) -> Any:
            begun = self._guard(self.tracker.begins_optimizer)
            outermost, result = self._outermost(kind, lambda: original(*args, **keywords))
            if outermost and begun is not None:
                self._guard(self._end_optimizer, begun, ends_step=ends_step)
            return result

        return act

    def _on_save(self, original: Any, args: Any, keywords: Any) -> Any:
        begin = self._guard(self._begin_act)
        outermost, result = self._outermost("save", lambda: original(*args, **keywords))
        if outermost and begin is not None:
            self._guard(
                lambda: self.tracker.interrupted(
                    Interruption.CHECKPOINT, begin, self.recorder.mark()
                )
            )
        return result

    # -- what is known of the models ----------------------------------------------------------

    @property
    def sources(self) -> dict[str, str | None]:
        """Which mechanism gives each figure; None where one of the models has none."""
        known: dict[str, str | None] = {"local_backward_end": backward.SOURCE}
        for adapter in self._adapters:
            for name, source in adapter.sources.items():
                known[name] = source if name not in known or known[name] == source else None
        return known

    def reduced(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that are reduced, each once, frozen and ignored ones not."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for number, construction in enumerate(self._constructions):
            for name, parameter in construction.reduced.items():
                # Names of several models may be equal.
                key = f"{number}.{name}" if len(self._constructions) > 1 else name
                found.setdefault(id(parameter), (key, parameter))
        return dict(found.values())

    def describe_ddps(self) -> tuple[DdpFacts, ...]:
        """Describes how the script has built its models."""
        return tuple(construction.describe() for construction in self._constructions)

    @property
    def optimized(self) -> tuple[OptimizedParameter, ...]:
        """The parameters that digests of gradients index."""
        return self._digests.parameters

    def let_go(self) -> None:
        """Takes everything out and forgets the models, which a script may want to free."""
        self.uninstall()
        self.ddps.clear()
        self._adapters.clear()
        self._constructions.clear()
        if self.started:
            self._digests.let_go()

    def bucket_bytes(self) -> tuple[int, ...] | None:
        """Returns the sizes of all buckets as DDP's logger has them; None where it has none.

        DDP could also make zeros in the shape of its buckets, as large as all gradients: too
        much memory for somebody else's training.
        """
        sizes: list[int] = []
        for ddp in self.ddps:
            logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            text = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes")
            if not isinstance(text, str) or not text.strip():
                return None
            sizes += [int(size) for size in text.split(",")]
        return tuple(sizes) or None


def _leading(plan: Sequence[tuple[Variant, int]], variant: Variant) -> int:
    """Returns the steps of a plan before the first block of another variant."""
    steps = 0
    for block, count in plan:
        if block is not variant:
            break
        steps += count
    return steps


def _has_closure(args: Any, keywords: Any) -> bool:
    """Tells whether an optimizer's step, called with itself first, runs a closure."""
    return (args[1] if len(args) > 1 else keywords.get("closure")) is not None
