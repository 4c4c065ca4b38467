"""Keeps, while a script trains, what one of its steps can be computed again from.

On every rank the micro-batches that entered the step. On the rank that will compute it again
also a copy of the bare model as the step begins, and the gradients after the step's last
backward, before anybody clips, unscales or uses them. All copies are in host memory.

What enters a step need not be what was fetched in it: some loaders (Accelerate's) fetch one
batch ahead. So batches are kept from the step before on, and the tensors that enter forward are
looked for in them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.measure import ddp_adapter
from ddp_profiler.measure.batches import number_of_samples
from ddp_profiler.measure.isolation import fp32_rounding

_HOST = torch.device("cpu")

P = ParamSpec("P")
T = TypeVar("T")


class CannotKeepError(Exception):
    """The step cannot be computed again; the message says why, in a clause."""


@dataclass
class _Fetch:
    """A batch that a loader gave, as it was then."""

    step: int
    loader: int
    batch: Any
    entered: bool = False
    """Whether it was seen to enter forward in the step that is kept."""


@dataclass(frozen=True)
class Share:
    """What one rank contributes to the step.

    Attributes:
        micro_batches: What the loaders gave, in the order in which they did.
        samples: Samples that entered each micro-step; None where they were not seen.
        entered: Whether the micro-batches were seen to enter forward.
    """

    micro_batches: list[Any]
    samples: list[int | None]
    entered: bool


@dataclass(frozen=True)
class KeptModel:
    """The model and the gradients of the step on the rank that computes it again.

    Attributes:
        module: The bare model before the step, in host memory; of several DDP modules a list.
        device: Where the script has it.
        parameters: The names of the parameters that DDP reduces.
        gradients: Their gradients after the step's last backward, in host memory, divided by
            the GradScaler's scale.
        ranks: The ranks of DDP's group, in its order.
        autocast: The type that autocast computed in where the model was called; None without.
        rounding: Relative rounding of a product in fp32 on that device.
        caveats: Why the gradients need not be those of one process.
    """

    module: nn.Module
    device: torch.device
    parameters: tuple[str, ...]
    gradients: Mapping[str, Tensor | None]
    ranks: tuple[int, ...]
    autocast: torch.dtype | None
    rounding: float
    caveats: tuple[str, ...]


def _kept(
    tell: Callable[Concatenate[KeptStep, P], None],
) -> Callable[Concatenate[KeptStep, P], None]:
    """Has what fails cost the comparison only, never the observation."""

    @functools.wraps(tell)
    def told(self: KeptStep, /, *args: P.args, **keywords: P.kwargs) -> None:
        if self.problem:
            return
        try:
            tell(self, *args, **keywords)
        except CannotKeepError as error:
            self.give_up(str(error))
        except Exception as error:
            first = (str(error).splitlines() or ["no message"])[0].rstrip(".")
            self.give_up(f"{type(error).__name__}: {first}")

    return told


class KeptStep:
    """What is kept of one step on one rank.

    Each act of the script is told with the number of the step that it belongs to.

    Args:
        step: The step to keep, counted from 0; at least 1, since the one before it is watched.
        leads: Whether this rank keeps the model and the gradients.
        batch_dim: Dimension of forward's first tensor that counts samples.
    """

    def __init__(self, step: int, *, leads: bool, batch_dim: int = 0) -> None:
        self.step = step
        self.problem = ""
        """Why the step cannot be computed again, in a clause; empty where it can."""
        self.share: Share | None = None
        self.model: KeptModel | None = None
        self._leads = leads
        self._batch_dim = batch_dim
        self._fetches: list[_Fetch] = []
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._micro_steps = {step - 1: 0, step: 0}
        self._samples: list[int | None] = []
        self._first_forward = True
        self._evaluated = False
        self._scalers: dict[int, Any] = {}
        self._module: nn.Module | None = None
        self._live: nn.Module | None = None
        self._pairs: dict[str, tuple[nn.Parameter, Tensor]] = {}
        """Each parameter that is reduced, by its name, and its copy from before the step."""
        self._gradients: dict[str, Tensor | None] = {}
        self._gradients_at = 0
        self._ranks: tuple[int, ...] = ()
        self._device = _HOST
        self._autocast: torch.dtype | None = None
        self._caveats: tuple[str, ...] = ()

    @property
    def micro_steps(self) -> int:
        """Backward calls in the step."""
        return self._micro_steps[self.step]

    def give_up(self, problem: str) -> None:
        """Lets go of everything, for a reason."""
        self.problem = self.problem or problem
        self.share = self.model = None
        self._forget()

    # -- told while the script trains ---------------------------------------------------------

    @_kept
    def fetched(self, step: int, loader: Any, batch: Any) -> None:
        """Tells that a loader has given a batch."""
        if step in self._micro_steps:
            number = self._loaders.setdefault(loader, next(self._numbers))
            try:
                own = copy_to_host(batch)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                raise CannotKeepError(
                    f"a batch cannot be copied ({type(error).__name__}: {first})"
                ) from error
            self._fetches.append(_Fetch(step, number, own))

    @_kept
    def evaluated(self, step: int) -> None:
        """Tells that a model was called without gradients."""
        self._evaluated |= step == self.step

    @_kept
    def begins(
        self, step: int, ddps: Sequence[DDP], reduced: Callable[[], Mapping[str, nn.Parameter]]
    ) -> None:
        """Tells that something is about to be done: the first of a step begins it.

        Frameworks put something in the place of the model's forward while they call it, so that
        it is not copied just then.

        Args:
            step: The step that it belongs to.
            ddps: All models of the script.
            reduced: Returns the parameters that they reduce.
        """
        if step == self.step and not self._ranks and ddps:
            self._look_at(ddps)
            if self._leads:
                self._copy_models(ddps, reduced())

    @_kept
    def called(self, step: int, inputs: object) -> None:
        """Tells that a model is about to be called.

        Args:
            step: The step that the call belongs to.
            inputs: What it is called with.
        """
        if step != self.step:
            return
        if not self._samples:
            self._look_at_call()
        if self._first_forward:
            self._first_forward = False
            self._samples.append(number_of_samples(inputs, self._batch_dim))
        self._match(inputs)

    @_kept
    def scaled(self, step: int, scaler: Any) -> None:
        """Tells that a GradScaler has scaled a loss."""
        if step == self.step:
            self._scalers[id(scaler)] = scaler

    @_kept
    def went_back(self, step: int) -> None:
        """Tells that a backward has returned."""
        if step not in self._micro_steps:
            return
        self._micro_steps[step] += 1
        self._first_forward = True
        # In all likelihood the last one; should another one follow, it replaces this one.
        if (
            self._leads
            and step == self.step
            and self.micro_steps >= self._micro_steps[self.step - 1]
        ):
            self._keep_gradients()

    @_kept
    def finish(self) -> None:
        """Tells that the step is over, and puts together what is known of it."""
        if not self.micro_steps or not self._samples:
            raise CannotKeepError(f"no model was trained in step {self.step}")
        self.share = self._own_share()
        if self._leads:
            self.model = self._own_model()
        self._forget()

    def _forget(self) -> None:
        """Lets go of what the script may want to free."""
        self._fetches.clear()
        self._scalers.clear()
        self._pairs.clear()
        self._module = self._live = None
        self._gradients = {}

    # -- the model and its gradients ----------------------------------------------------------

    def _look_at(self, ddps: Sequence[DDP]) -> None:
        group = ddps[0].process_group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._device = next(ddps[0].parameters()).device
        caveats = []
        if any(ddp_adapter.has_user_hook(ddp) for ddp in ddps):
            caveats.append(
                "A communication hook of the script reduces the gradients: they need not equal "
                "those of one process."
            )
        if any(getattr(ddp, "mixed_precision", None) is not None for ddp in ddps):
            caveats.append(
                "DDP reduces in another precision (mixed_precision): gradients need not equal "
                "those of one process."
            )
        self._caveats = tuple(caveats)

    def _look_at_call(self) -> None:
        kind = self._device.type
        if torch.is_autocast_enabled(kind):
            self._autocast = torch.get_autocast_dtype(kind)
        if self._module is not None and self._live is not None:
            # Some switch to training mode in each step.
            for live, own in zip(self._live.modules(), self._module.modules(), strict=True):
                own.training = live.training
        self._live = None

    def _copy_models(self, ddps: Sequence[DDP], reduced: Mapping[str, nn.Parameter]) -> None:
        bare = [bare_module(ddp) for ddp in ddps]
        whole = bare[0] if len(bare) == 1 else nn.ModuleList(bare)
        self._live = whole
        try:
            self._module = copy_to_host(whole)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0].rstrip(".")
            raise CannotKeepError(
                f"the model cannot be copied ({type(error).__name__}: {first})"
            ) from error
        copies = dict(self._module.named_parameters())
        known = {id(parameter) for parameter in reduced.values()}
        self._pairs = {
            name: (parameter, copies[name])
            for name, parameter in whole.named_parameters()
            if id(parameter) in known
        }

    def _keep_gradients(self) -> None:
        for parameter, before in self._pairs.values():
            if not torch.equal(parameter.detach().to(_HOST), before.detach()):
                raise CannotKeepError(
                    "weights changed before the step's last backward, as where an optimizer "
                    "evaluates its closure several times"
                )
        self._gradients = {
            name: None if parameter.grad is None else _to_host(parameter.grad)
            for name, (parameter, _) in self._pairs.items()
        }
        self._gradients_at = self.micro_steps
        # Scalers change it only when the optimizers have stepped.
        scales = {float(scaler.get_scale()) for scaler in self._scalers.values()}
        if len(scales) > 1:
            raise CannotKeepError("several GradScalers of different scales are used in one step")
        for gradient in self._gradients.values():
            if gradient is not None and scales:
                gradient.div_(*scales)

    def _own_model(self) -> KeptModel:
        before = self._micro_steps[self.step - 1]
        if self._gradients_at != self.micro_steps or self._module is None:
            raise CannotKeepError(
                f"step {self.step} had {_backwards(self.micro_steps)}, the one before it {before}"
            )
        return KeptModel(
            module=self._module,
            device=self._device,
            parameters=tuple(self._pairs),
            gradients=self._gradients,
            ranks=self._ranks,
            autocast=self._autocast,
            rounding=fp32_rounding(self._device),
            caveats=self._caveats,
        )

    # -- the micro-batches --------------------------------------------------------------------

    def _match(self, inputs: object) -> None:
        """Marks the batch that has most of the tensors that enter forward."""
        entering = [_to_host(values) for values in _tensors_in(inputs) if values.dim()]
        best: tuple[tuple[int, bool, bool], _Fetch] | None = None
        for fetch in self._fetches:
            own = list(_tensors_in(fetch.batch))
            count = sum(any(_same(a, b) for b in own) for a in entering)
            # Of equal ones the next of this step: so it is with loaders that fetch nothing ahead.
            rank = (count, not fetch.entered, fetch.step == self.step)
            if count and (best is None or rank > best[0]):
                best = rank, fetch
        if best is not None:
            best[1].entered = True

    def _own_share(self) -> Share:
        entered = any(fetch.entered for fetch in self._fetches)
        if self._evaluated and not entered:
            raise CannotKeepError(
                f"step {self.step} holds calls of the model without gradients, and which batches "
                "it was trained on could not be seen"
            )
        chosen: list[_Fetch] = []
        for loader in {fetch.loader for fetch in self._fetches}:
            own = [fetch for fetch in self._fetches if fetch.loader == loader]
            seen = [place for place, fetch in enumerate(own) if fetch.entered]
            if seen:
                # What lies between two that were seen has entered too, changed on the way.
                chosen += own[seen[0] : seen[-1] + 1]
            elif not self._evaluated:
                chosen += [fetch for fetch in own if fetch.step == self.step]
        if not chosen:
            raise CannotKeepError(f"no DataLoader gave a batch in step {self.step}")
        taken = {id(fetch) for fetch in chosen}
        batches = [fetch.batch for fetch in self._fetches if id(fetch) in taken]
        return Share(batches, list(self._samples), entered)


def bare_module(ddp: DDP) -> nn.Module:
    """Returns the module that DDP wraps, as it was before ``torch.compile``."""
    module: Any = ddp.module
    while isinstance(getattr(module, "_orig_mod", None), nn.Module):
        module = module._orig_mod
    bare: nn.Module = module
    return bare


def copy_to_host(values: T) -> T:
    """Returns a deep copy whose parameters, buffers and nested tensors are in host memory.

    Without a copy on the device in between, for which there may be no room. Process groups
    cannot be copied and are shared.

    Args:
        values: A module, or tensors in dictionaries, tuples and lists.
    """
    known: dict[int, Any] = {}
    tensors: Iterator[Tensor]
    if isinstance(values, nn.Module):
        for module in values.modules():
            groups = (v for v in vars(module).values() if isinstance(v, dist.ProcessGroup))
            known |= {id(group): group for group in groups}
        tensors = iter([*values.parameters(), *values.buffers()])
    else:
        tensors = _tensors_in(values)
    for tensor in tensors:
        if type(tensor) is nn.Parameter:
            known[id(tensor)] = nn.Parameter(_to_host(tensor), tensor.requires_grad)
        elif type(tensor) is Tensor:
            known[id(tensor)] = _to_host(tensor)
    return copy.deepcopy(values, known)


def _to_host(values: Tensor) -> Tensor:
    return values.detach().to(_HOST, copy=True)


def _tensors_in(values: object) -> Iterator[Tensor]:
    """Yields the tensors in nested mappings, tuples and lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors_in(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors_in(value)


def _same(a: Tensor, b: Tensor) -> bool:
    """Tells whether two tensors hold the same values, in whatever shape."""
    if a.numel() != b.numel() or a.dtype != b.dtype or a.layout != b.layout or not a.numel():
        return False
    if a.layout is not torch.strided:
        return a.shape == b.shape and torch.equal(a, b)
    return torch.equal(a.reshape(-1), b.reshape(-1))


def _backwards(count: int) -> str:
    return f"{count} backward call{'' if count == 1 else 's'}"
