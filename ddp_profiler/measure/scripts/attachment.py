"""Attaches to a training script that knows nothing of us, and lets go of it again.

What is observed is what every such script has to call: DistributedDataParallel, backward,
``Optimizer.step`` and ``zero_grad``, the DataLoader's iterator, GradScaler, gradient clipping,
``torch.save``. Each is replaced by a function that calls the original one with the same
arguments and passes on what it returns or raises. Between blocks and after the last one nothing
of ours is left in DDP. Between the windows of a long run the functions stay, and only tell that
something was done, so that steps can be counted. If anything of ours fails, everything is taken
out, it is said once, and training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum, auto
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
from ddp_profiler.measure.clock import DeviceTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.construction import building_package
from ddp_profiler.measure.scripts.digests import Digests
from ddp_profiler.measure.scripts.feeding import FeedWatch
from ddp_profiler.measure.scripts.kept_step import KeptStep
from ddp_profiler.measure.scripts.loss_divisor import loss_divisor
from ddp_profiler.measure.scripts.models import ModelFacts, Models
from ddp_profiler.measure.scripts.other_training import OtherTraining
from ddp_profiler.measure.scripts.steps import StepTracker
from ddp_profiler.measure.untraced import skip_frame
from ddp_profiler.schema import (
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
    # What these call: it is seen also where they have been imported by name, as by transformers.
    ("torch.serialization", "_save"),
    ("safetensors.torch", "serialize_file"),
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),
)


class _Purpose(Enum):
    """What a script calls a model for."""

    GRADIENTS = auto()
    """To be trained."""
    TRAINING = auto()
    """To train another one with what it returns."""
    EVALUATION = auto()


class Attachment:
    """Observes one process's training.

    Observing begins with the first DistributedDataParallel that is built, or called if it was
    built before: only then is it known on which device the script trains.

    Args:
        make_recorder: Makes what takes the marks of training on a device.
        plan: Variants and numbers of steps, one block after the other; steps of the variant
            None are counted only.
        warmup: Steps of the warm-up, with which the plan begins; digests are taken in it.
        batch_dim: The dimension of forward's first tensor that counts samples.
        on_failure: Told if something of ours has failed; nothing is left installed then.
        on_block: Told, between two steps, the variant of the block that begins; None after a
            window, when nothing is left in DDP, and at the end of the plan, when nothing is left
            installed.
        kept: Keeps what one step can be computed again from.
        on_feed: Told when more is known of what feeds training.
    """

    def __init__(
        self,
        make_recorder: Callable[[torch.device], Recorder],
        plan: Iterable[tuple[Variant | None, int]],
        *,
        warmup: int = 0,
        batch_dim: int = 0,
        on_failure: Callable[[Exception], None],
        on_block: Callable[[Variant | None], None] = lambda _: None,
        kept: KeptStep | None = None,
        on_feed: Callable[[], None] = lambda: None,
    ) -> None:
        self.models = Models()
        self.built = False
        """Whether the script has built any, or trained one that was there."""
        self.started = False
        self.recorder: Recorder
        self.tracker: StepTracker
        self.feed = FeedWatch(on_feed, batch_dim)
        self._watch: BackwardWatch
        self._digests: Digests
        self._make_recorder = make_recorder
        self._plan = plan
        self._batch_dim = batch_dim
        self._on_failure = on_failure
        self._on_block = on_block
        self._kept = kept
        self._divisors: Counter[float | None] = Counter()
        self._scaled = False
        """Whether a GradScaler has scaled a loss since the last backward."""
        self._thread = threading.get_ident()
        self._between_blocks = False
        self._depth: dict[str, int] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._handles: list[Any] = []
        self._stepping: list[tuple[Any, int]] = []
        self._warmup = warmup
        self._user_hooks: Any = None
        self.elsewhere = OtherTraining()
        """What the script trains with before it builds any, and if it never does."""
        self._resting = False
        """Whether steps are only counted now, between two windows."""
        self.installed = False

    # -- putting in and taking out ------------------------------------------------------------

    def install(self) -> None:
        """Looks out for models; call it on the thread that trains.

        A model that is there already is observed from its first call on.
        """
        self.installed = True
        self._user_hooks = ddp_adapter.installed()
        self._user_hooks.__enter__()
        self._replace(DDP, "__init__", self._on_init)
        self.elsewhere.install()
        self._replace(DDP, "forward", self._on_forward)
        self._replace_compiled()

    def _start(self, device: torch.device) -> None:
        """Begins to observe training on a device."""
        self.elsewhere.uninstall()
        self.recorder = self._make_recorder(device)
        self._watch = BackwardWatch(self.recorder)
        self.tracker = StepTracker(self.recorder, self._plan, self._switch)
        self._digests = Digests(
            self.recorder, self._warmup, lambda: self.models.observed, self._reducible
        )
        self.started = True
        self._replace(torch.autograd, "backward", self._on_backward)
        self._replace(Optimizer, "zero_grad", self._of_optimizer("zero"))
        self._replace(torch.amp.GradScaler, "step", self._of_optimizer("scaler", ends_step=True))
        self._replace(torch.amp.GradScaler, "unscale_", self._of_optimizer("unscale"))
        self._replace(torch.amp.GradScaler, "scale", self._on_scale)
        for name in _CLIPPING:
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                self._replace(module, name, self._of_optimizer("clip"))
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        self._replace(iterator, "__next__", self._on_fetch)
        self._replace_compiled()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def uninstall(self) -> None:
        """Takes everything of ours out of torch and of the models; twice is once."""
        if not self.installed:
            return
        self.installed = False
        self.elsewhere.uninstall()
        for owner, name, original, ours in reversed(self._replaced):
            # Whoever has put something around ours meanwhile keeps it; ours only passes on then.
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        self._replaced.clear()
        for handle in self._handles:
            handle.remove()
        for adapter in self.models.adapters():
            adapter.detach()
        if self._user_hooks is not None:
            self._user_hooks.__exit__(None, None, None)

    def _replace(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        """Puts a function in the place of another: ``act(original, args, keywords)``."""
        original = vars(owner)[name]

        ends_step = name == "step"

        @functools.wraps(original)
        def ours(*args: Any, **keywords: Any) -> Any:
            # Most acts between two windows count for nothing: the first after a step ends it.
            if self._resting and not ends_step and not self.tracker.stepped:
                return original(*args, **keywords)
            # Dynamo sees nothing but the call that it knows how to compile.
            if torch.compiler.is_compiling() or not self.installed or self._between_blocks:
                return original(*args, **keywords)
            if threading.get_ident() != self._thread:
                self.elsewhere.on_thread |= owner is DDP
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
            # Nothing of this may reach the training, whatever state our own things are in.
            with contextlib.suppress(Exception):
                self.uninstall()
            with contextlib.suppress(Exception):
                self._on_failure(error)
            return None

    def _switch(self, variant: Variant | None) -> None:
        """Attaches to DDP or detaches from it, between two steps."""
        # What we write and send meanwhile is no act of the script.
        self._between_blocks = True
        try:
            self._begin_block(variant)
        finally:
            self._between_blocks = False

    def _begin_block(self, variant: Variant | None) -> None:
        if variant is not None:
            self._wake()
            if self.started:
                self.models.keep(rebuilt=self.tracker.step > 1)
                self._digests.between_blocks(self.tracker.step)
            for adapter in self.models.adapters():
                adapter.norms.wanted = variant is Variant.WARMUP
                if variant is Variant.PLAIN:
                    adapter.detach()
                else:
                    adapter.attach()
            self._on_block(variant)
        elif self.tracker.done:
            self.uninstall()
            self._on_block(None)
        else:
            for adapter in self.models.adapters():
                adapter.detach()
            self._on_block(None)
            # The script may want to free them; those that train on are found at their next call.
            self.models.forget()
            self._resting = True

    def _wake(self) -> None:
        self._replace_savers()
        if self._resting:
            self._resting = False
            if isinstance(self.recorder.timeline, DeviceTimeline):
                # Far from its anchor, a device's time is not known well enough.
                self.recorder.timeline.move_anchor()

    def _rests(self) -> bool:
        """Tells that something was done, and whether nothing of it is to be recorded.

        That is so between two windows, and when something of ours has failed.
        """
        if self._resting:
            self._guard(self.tracker.act)
        return self._resting or not self.installed

    def _replace_compiled(self) -> None:
        compiled = sys.modules.get("torch._dynamo.eval_frame")
        if compiled is not None and not self._has_replaced(compiled.OptimizedModule, "__call__"):
            self._replace(compiled.OptimizedModule, "__call__", self._on_compiled)

    def _has_replaced(self, owner: Any, name: str) -> bool:
        return any(one is owner and its == name for one, its, _, _ in self._replaced)

    def _replace_savers(self) -> None:
        if not self.installed:
            return
        for module_name, name in _SAVERS:
            module = sys.modules.get(module_name)
            if (
                module is not None
                and hasattr(module, name)
                and not self._has_replaced(module, name)
            ):
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
        self._guard(self.models.note, args[0], built_by or "")
        if not self._resting:
            self._guard(self._adopt, args[0])
        return result

    def _adopt(self, ddp: DDP) -> None:
        # Of one that was there before nobody knows who has built it.
        self.models.note(ddp, "")
        self.built = True
        if not self.started:
            self._start(next(ddp.parameters()).device)
        self._replace_savers()
        adapter = self.models.observe(ddp, self.recorder)
        adapter.norms.wanted = self.tracker.warming_up
        if self.tracker.observing:
            adapter.attach()

    def _on_forward(self, original: Any, args: Any, keywords: Any) -> Any:
        return self._call(original, args, keywords, ddp=args[0])

    def _on_compiled(self, original: Any, args: Any, keywords: Any) -> Any:
        ddp = getattr(args[0], "_orig_mod", None)
        if not isinstance(ddp, DDP):
            return original(*args, **keywords)
        return self._call(original, args, keywords, ddp)

    def _call(self, original: Any, args: Any, keywords: Any, ddp: DDP) -> Any:
        if self._depth.get("forward") or self._rests():
            return original(*args, **keywords)
        if torch.is_grad_enabled() and not self.models.observes(ddp):
            self._guard(self._adopt, ddp)
        if not self.started or not self.installed:
            return original(*args, **keywords)
        begun = self._guard(self._begin_call, ddp, (args[1:], keywords))
        try:
            _, result = self._outermost("forward", lambda: original(*args, **keywords))
        finally:
            self.recorder.phase = None
        if begun is not None:
            self._guard(self._end_call, *begun, ddp, (args[1:], keywords))
        return result

    def _purpose(self, ddp: DDP) -> _Purpose:
        """Tells what a model is called for."""
        if torch.is_grad_enabled():
            return _Purpose.GRADIENTS
        if torch.is_inference_mode_enabled() or not ddp.module.training:
            return _Purpose.EVALUATION
        # Without gradients a GAN calls its generator too, to train the discriminator.
        fetched = self.tracker.fetched_for_evaluation
        return _Purpose.EVALUATION if fetched else _Purpose.TRAINING

    def _begin_call(self, ddp: DDP, inputs: Any) -> tuple[_Purpose, Any]:
        self._act()
        purpose = self._purpose(ddp)
        if purpose is _Purpose.GRADIENTS:
            self.models.train(ddp)
        if self._kept is not None and purpose is _Purpose.EVALUATION:
            self._kept.evaluated(self.tracker.step)
        elif self._kept is not None and purpose is _Purpose.GRADIENTS:
            self._kept.called(self.tracker.step, inputs)
        if purpose is not _Purpose.EVALUATION:
            self.tracker.begins_call()
            if self.tracker.observing:
                self.recorder.phase = SpanKind.FORWARD
        return purpose, self.recorder.mark()

    def _end_call(self, purpose: _Purpose, begin: Any, ddp: DDP, inputs: Any) -> None:
        end = self.recorder.mark()
        if purpose is _Purpose.EVALUATION:
            self.feed.evaluated()
            self.tracker.interrupted(Interruption.EVALUATION, begin, end)
        elif purpose is _Purpose.TRAINING:
            self.tracker.called_without_gradients(begin, end)
        else:
            samples = number_of_samples(inputs, self._batch_dim)
            self.tracker.called(begin, end, samples, self.feed.tokens(ddp, inputs))
            self.feed.trained(samples, joins=ddp._join_config.enable)

    def _on_backward(self, original: Any, args: Any, keywords: Any) -> Any:
        if self._depth.get("backward") or self._rests():
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
        if self.tracker.warming_up:
            # What a backward that raised has left.
            for adapter in self.models.adapters():
                adapter.norms.forget()
        if self.tracker.observing:
            root = args[0] if args else keywords.get("tensors")
            if not isinstance(root, Tensor) and root:
                root = next(iter(root))
            if isinstance(root, Tensor) and root.requires_grad:
                handle = self._watch.watch(root)
                if self.tracker.warming_up:
                    self._divisors[loss_divisor(root, scaled=self._scaled)] += 1
            self.recorder.phase = SpanKind.BACKWARD
        return self.recorder.mark(), handle

    def _end_backward(self, begin: Any) -> None:
        self.tracker.went_back(begin, self.recorder.mark())
        if self.tracker.warming_up:
            for adapter in self.models.adapters():
                adapter.norms.take()
        self._scaled = False
        if self._kept is not None:
            self._kept.went_back(self.tracker.step)

    def _on_scale(self, original: Any, args: Any, keywords: Any) -> Any:
        result = original(*args, **keywords)
        self._scaled = True
        if self._kept is not None:
            self._kept.scaled(self.tracker.step, args[0])
        return result

    def _on_fetch(self, original: Any, args: Any, keywords: Any) -> Any:
        if self._rests():
            return original(*args, **keywords)
        begin = self._guard(self._begin_fetch, args[0])
        try:
            outermost, batch = self._outermost("fetch", lambda: original(*args, **keywords))
        except StopIteration:
            if begin is not None:
                self._guard(self.tracker.exhausted)
            raise
        if outermost and begin is not None:
            self._guard(self._end_fetch, begin, args[0], batch)
        return batch

    def _begin_fetch(self, iterator: Any) -> Any:
        self._act()
        self.feed.meet(iterator)
        return self.recorder.mark()

    def _end_fetch(self, begin: Any, iterator: Any, batch: Any) -> None:
        # Frameworks evaluate the module inside DDP, whose calls are not seen.
        end = self.recorder.mark()
        # When a window begins none was called in it yet: then all that were ever seen count.
        training = [ddp.module.training for ddp in self.ddps or self.models.built]
        evaluates = not torch.is_grad_enabled() or (bool(training) and not any(training))
        self.tracker.fetched(begin, end, evaluates=evaluates)
        self.feed.fetched(iterator, batch, compares=self.tracker.warming_up, evaluates=evaluates)
        if self._kept is not None:
            self._kept.fetched(self.tracker.step, iterator, batch)

    def _act(self) -> None:
        self.tracker.act()
        if self._kept is not None:
            self._kept.begins(self.tracker.step, self.ddps, self._reducible)

    def _begin_act(self) -> Any:
        self._act()
        return self.recorder.mark()

    def _before_step(self, optimizer: Any, args: Any, keywords: Any) -> None:
        if threading.get_ident() == self._thread:
            if self._resting:
                self._stepping.append((None, self.tracker.acts))
                return
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
        end = self.recorder.mark() if self.tracker.recording else None
        self.tracker.optimized(begun, end, ends_step=ends_step)

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
        if self._rests():
            return original(*args, **keywords)
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
    def ddps(self) -> list[DDP]:
        """The models that are observed and still there."""
        return list(self.models.observed.values())

    def facts(self, *, rebuilt: bool) -> ModelFacts | None:
        """Returns what is known of the models that are trained; see :meth:`Models.facts`."""
        found = self.models.facts(rebuilt=rebuilt)
        if found is None:
            return None
        return replace(found, sources={"local_backward_end": backward.SOURCE, **found.sources})

    @property
    def loss_divisor(self) -> float | None:
        """What the loss of most micro-steps of the warm-up was divided by before backward."""
        return self._divisors.most_common(1)[0][0] if self._divisors else None

    def reduced(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that the models that are trained reduce, each once."""
        return self.models.reduced(self.models.counted)

    def _reducible(self) -> dict[str, nn.Parameter]:
        """Returns those of all models: each may be trained yet."""
        return self.models.reduced(self.models.observed)

    @property
    def optimized(self) -> tuple[OptimizedParameter, ...]:
        """The parameters that digests of gradients index."""
        return self._digests.parameters

    def let_go(self) -> None:
        """Takes everything out and forgets the models, which a script may want to free."""
        self.uninstall()
        self.models.forget()


def _has_closure(args: Any, keywords: Any) -> bool:
    """Tells whether an optimizer's step, called with itself first, runs a closure."""
    return (args[1] if len(args) > 1 else keywords.get("closure")) is not None
