"""The replay: one step of a script once more, as the loss of one process that sees all of it.

What scale a script's gradients should have, nothing in the run tells. The user says it with a
function that computes the loss of the whole global batch with the bare model. When the script
has ended, rank 0 compares the gradients of that loss with those that DDP had reduced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.measure.gradients import compare_gradients
from ddp_profiler.measure.isolation import alone, random_kept
from ddp_profiler.measure.proof import caveats, unevenness
from ddp_profiler.measure.scripts.kept_step import CannotKeepError, KeptModel, KeptStep, Share
from ddp_profiler.schema import BatchProof, LevelSettings
from ddp_profiler.workload.importing import Wanted, describe_error, file_of, find_function

Oracle = Callable[[nn.Module, list[Any]], Tensor]
"""From the bare model and the micro-batches of all ranks to the loss of the global batch."""

_WANTED = Wanted(
    noun="function",
    arguments=2,
    definition="def {}(module, batches)",
    kind="a function from the module and the micro-batches to the loss",
    docs="docs/scripts.md",
)
_FP32 = torch.finfo(torch.float32).eps


def load_oracle(name: str, folder: Path | None) -> Oracle:
    """Imports the function that ``--replay`` names; torch's random numbers stay as they were.

    Args:
        name: ``package.module:function``.
        folder: The script's folder, which is looked in first, as when the script runs.

    Raises:
        UsageError: There is no such function, or it does not take two arguments.
    """
    module, _, attribute = name.partition(":")
    paths = list(sys.path)
    here = [str(Path.cwd())] if "" not in paths else []
    sys.path[:0] = [*([str(folder)] if folder else []), *here]
    try:
        # stdout is the script's.
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(sys.stderr):
            oracle: Oracle = find_function(f"--replay {name}", module, attribute, _WANTED)
    except InputError as error:
        raise UsageError(error.message, error.remedy) from error
    finally:
        sys.path[:] = paths
    return oracle


class Replay:
    """One rank's part of a replay.

    Args:
        name: The function as the user named it.
        oracle: The function.
        kept: What is kept of the step on this rank.
    """

    def __init__(self, name: str, oracle: Oracle, kept: KeptStep) -> None:
        self.kept = kept
        self._name = name
        self._oracle = oracle
        self._main: ModuleType | None = None
        self._shared = False

    def share(self, path: Path) -> str | None:
        """Writes this rank's micro-batches to a file, once, and lets go of them.

        Args:
            path: The file, in the run folder.

        Returns:
            Why there are none, in a clause; empty if they are there; None if that was told.
        """
        if self._shared:
            return None
        self._shared = True
        kept = self.kept
        # Batches may be of types of the script's own, which is then no longer ``__main__``.
        self._main = sys.modules.get("__main__")
        kept.finish()
        if kept.share is not None:
            try:
                path.unlink(missing_ok=True)
                # Another user can neither have put it there nor change it.
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
                with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                    # Not torch.save, which may be observed.
                    torch.serialization.save(vars(kept.share), file)
            except Exception as error:
                path.unlink(missing_ok=True)
                kept.give_up(
                    f"micro-batches cannot be written ({type(error).__name__}: {_first(error)})"
                )
            kept.share = None
        return kept.problem

    def prove(
        self,
        accumulation: int,
        file_of_rank: Callable[[int], Path],
        problem_of_rank: Callable[[int], str | None],
    ) -> BatchProof:
        """Compares the gradients on the rank that leads, after the script has ended.

        Nothing in the script's models, its random numbers or its process groups is touched. The
        copies are let go of.

        Args:
            accumulation: Micro-steps that the script has in most of its steps.
            file_of_rank: Where each rank has written its micro-batches.
            problem_of_rank: Why it has written none; None where that is not known.
        """
        try:
            model = self._model(accumulation)
            shares = self._read(model, file_of_rank, problem_of_rank)
            return self._compare(model, shares)
        except CannotKeepError as error:
            return not_compared(str(error))
        except (Exception, KeyboardInterrupt) as error:
            return not_compared(f"{type(error).__name__}: {_first(error)}")
        finally:
            self.kept.give_up("it has been compared")

    def _model(self, accumulation: int) -> KeptModel:
        kept = self.kept
        if kept.problem:
            raise CannotKeepError(kept.problem)
        if kept.model is None:
            raise CannotKeepError(f"the script ended before step {kept.step} was over")
        if kept.micro_steps < accumulation:
            raise CannotKeepError(
                f"step {kept.step} was incomplete, {kept.micro_steps} of {accumulation} "
                "micro-steps; another --warmup takes another step"
            )
        return kept.model

    def _read(
        self,
        model: KeptModel,
        file_of_rank: Callable[[int], Path],
        problem_of_rank: Callable[[int], str | None],
    ) -> list[Share]:
        shares = []
        for rank in model.ranks:
            problem = problem_of_rank(rank)
            if problem is None:
                problem = "it has told nothing of its micro-batches"
            if problem:
                raise CannotKeepError(f"rank {rank}: {problem}")
            path = file_of_rank(rank)
            if not path.is_file():
                raise CannotKeepError(f"the micro-batches of rank {rank} are not in {path.parent}")
            with self._script_as_main():
                shares.append(Share(**_load(path, model.device)))
        return shares

    @contextlib.contextmanager
    def _script_as_main(self) -> Iterator[None]:
        before = sys.modules["__main__"]
        sys.modules["__main__"] = self._main or before
        try:
            yield
        finally:
            sys.modules["__main__"] = before

    def _compare(self, model: KeptModel, shares: Sequence[Share]) -> BatchProof:
        batches = [batch for share in shares for batch in share.micro_batches]
        samples = [number for share in shares for number in share.samples]
        level = LevelSettings(
            id="replay",
            dp=len(model.ranks),
            micro_batch=Counter(samples).most_common(1)[0][0] or 1,
            accumulation=self.kept.micro_steps,
            placement="packed",
            ranks=model.ranks,
        )
        reasons = [*caveats([model.module], level), *model.caveats]
        if len(set(samples)) > 1:
            reasons.append(unevenness(samples))
        if not all(share.entered for share in shares):
            reasons.append(
                "Which batches entered the model could not be seen, since they are changed on "
                "the way; those that were fetched in the step were taken."
            )
        reference, rounding = self._reference(model, batches)
        notes = [f"Step {self.kept.step} of the script, in its warm-up, against {self._name}."]
        if rounding > _FP32:
            notes.append(
                f"It computed with a relative rounding of {rounding:.1g}, and gradients are "
                "compared accordingly."
            )
        proof = compare_gradients(
            model.gradients, reference, level, must_be_equal=not reasons, rounding=rounding
        )
        if proof.max_rel_error is None:
            notes.append("Another --warmup takes another step.")
        return dataclasses.replace(
            proof, notes=(*notes, *reasons, *proof.notes), must_be_equal=not reasons
        )

    def _reference(
        self, model: KeptModel, batches: list[Any]
    ) -> tuple[Mapping[str, Tensor | None], float]:
        """Returns the gradients of the function's loss, and the rounding that it computed with."""
        kind, module = model.device.type, model.module.to(model.device)
        parameters = dict(module.named_parameters())
        wanted = [parameters[name] for name in model.parameters]
        rounding = _Rounding()
        with (
            random_kept(model.device),
            contextlib.redirect_stdout(sys.stderr),
            _uncompiled(),
            torch.inference_mode(False),
            torch.enable_grad(),
            alone([module]),
            rounding,
        ):
            with torch.autocast(kind, model.autocast, enabled=model.autocast is not None):
                loss = self._ask(module, batches)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                what = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
                raise CannotKeepError(
                    f"{self._name} returned {type(loss).__name__}{what}, not a loss of one number "
                    "that depends on the module's parameters"
                )
            # Not backward(): the script's hooks on parameters have no place here.
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return (
            {
                name: None if gradient is None else gradient.to(torch.device("cpu"))
                for name, gradient in zip(model.parameters, found, strict=True)
            },
            max(rounding.eps, model.rounding),
        )

    def _ask(self, module: nn.Module, batches: list[Any]) -> Any:
        try:
            return self._oracle(module, batches)
        except (Exception, SystemExit) as error:
            own = file_of(self._name.partition(":")[0])
            raise CannotKeepError(f"{self._name} raised {describe_error(error, own)}") from error


def not_compared(problem: str) -> BatchProof:
    """Returns a proof that says nothing but why."""
    note = f"Not compared with one process: {problem}."
    return BatchProof(None, None, None, None, None, (note,))


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        try:
            found: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        except pickle.UnpicklingError:
            # Batches of other types. What is read may run code, and is this user's own, as the
            # script is that wrote it.
            held = os.fstat(file.fileno())
            if not _is_own(held.st_uid, held.st_mode):
                raise CannotKeepError(
                    f"{path.name} holds other types than tensors, and another user may have "
                    "written it"
                ) from None
            file.seek(0)
            found = torch.load(file, map_location=device, weights_only=False)
    return found


def _is_own(owner: int, mode: int) -> bool:
    """Tells whether a file is this user's, and nobody else's to write."""
    return stat.S_ISREG(mode) and owner == os.getuid() and not mode & 0o022


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0].rstrip(".")


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Has parts of the model that ``torch.compile`` has made run as they were written."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the coarsest relative rounding of all floating-point results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = _FP32

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor) and result.is_floating_point():
                self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return results
