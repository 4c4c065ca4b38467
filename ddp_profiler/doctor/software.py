"""torch, CUDA and NCCL: what is installed, and what is really loaded."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ddp_profiler.doctor.verdict import Verdict, error, not_applicable, ok, warning
from ddp_profiler.measure import torch_probe

PROBE_LIMIT_S = 60.0
"""Importing torch from a slow file system takes long; a driver that hangs takes for ever."""

TWO_WHEELS = "https://github.com/pytorch/pytorch/issues/186591"
_MISSING_SYMBOL = "https://github.com/pytorch/pytorch/issues/176829"
_NAME_OF_WHEEL = re.compile(r"nvidia[-_.]nccl[-_.]cu(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself.

    Attributes:
        installed: Whether there is a package of that name.
        problem: Why it could not be imported or asked; None where it could.
        version: Its version.
        cuda: CUDA version that it was built with; None for another build.
        hip: ROCm's, likewise.
        path: Its folder.
        distributed: Whether torch.distributed is there.
        backends: Of ``gloo`` and ``nccl`` those that are there.
        cuda_available: Whether it can use a GPU.
        cuda_problem: What it said when it looked for one.
        device_count: GPUs that it sees.
        architectures: What its kernels were compiled for, as ``sm_90``.
        uuids: Of the GPUs that it sees, without a prefix.
        nccl_built: NCCL version that it was compiled against.
        nccl_loaded: NCCL version that was loaded with it.
        nccl_path: File of that one.
    """

    installed: bool = True
    problem: str | None = None
    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    path: str | None = None
    distributed: bool = False
    backends: tuple[str, ...] = ()
    cuda_available: bool = False
    cuda_problem: str | None = None
    device_count: int = 0
    architectures: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    nccl_built: str | None = None
    nccl_loaded: str | None = None
    nccl_path: str | None = None


@dataclass(frozen=True)
class Wheel:
    """An installed wheel of NCCL.

    Attributes:
        name: Its name, as ``nvidia-nccl-cu13``.
        version: Its version.
        library: Where it puts the library.
    """

    name: str
    version: str
    library: str


@dataclass(frozen=True)
class Software:
    """torch and the wheels around it.

    Attributes:
        torch: What torch says.
        wanted: Versions of torch that ddp_profiler was run with; None where not known.
        nccl_wheels: Installed wheels of NCCL.
    """

    torch: TorchFacts
    wanted: str | None
    nccl_wheels: tuple[Wheel, ...]


def read_software(limit_s: float = PROBE_LIMIT_S) -> Software:
    """Reads what is installed, and asks torch in a process of its own.

    Args:
        limit_s: Seconds that torch may take.
    """
    return Software(ask_torch(limit_s=limit_s), _wanted_torch(), _nccl_wheels())


def ask_torch(
    command: Sequence[str] = (sys.executable, "-P", torch_probe.__file__),
    limit_s: float = PROBE_LIMIT_S,
) -> TorchFacts:
    """Returns what torch says of itself; never raises and ends in time.

    Args:
        command: The program that asks it.
        limit_s: Seconds that it may take.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as problem:
        return TorchFacts(problem=f"{command[0]}: {problem.strerror or problem}")
    try:
        said, complained = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # In a system call of a driver even that may not end it: it is left behind then.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return TorchFacts(problem=f"the import did not end within {limit_s:g} s")
    # What was said counts, also of a process that aborts at its end.
    for line in said.splitlines():
        if line.startswith(torch_probe.MARK):
            values = json.loads(line.removeprefix(torch_probe.MARK))
            for name in ("backends", "architectures", "uuids"):
                values[name] = tuple(values.get(name) or ())
            return TorchFacts(**values)
    lines = complained.strip().splitlines()
    ended = process.returncode
    how = f"ended by {signal.Signals(-ended).name}" if ended < 0 else f"ended with {ended}"
    return TorchFacts(problem=f"the import {how}" + (f": {lines[-1]}" if lines else ""))


def judge_torch(software: Software) -> list[Verdict]:
    """Judges torch: there, importable, of a version that was run, with torch.distributed."""
    torch = software.torch
    wanted = software.wanted
    install = f"Install it: pip install 'torch{wanted or ''}'"
    if not torch.installed:
        return [error("torch", "torch is not installed.", install)]
    if torch.problem is not None:
        return [
            error("torch", f"torch cannot be imported: {torch.problem}", "Mend or reinstall torch.")
        ]
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    what = f"torch {torch.version} ({built})"
    verdicts = []
    if wanted is None or torch.version is None:
        verdicts.append(ok("torch", f"{what}; which versions were run is not known here."))
    elif SpecifierSet(wanted).contains(torch.version, prereleases=True):
        verdicts.append(ok("torch", f"{what}, of the versions that were run ({wanted})."))
    else:
        verdicts.append(
            warning(
                "torch",
                f"{what} is not one of the versions that were run ({wanted}).",
                f"{install}, or watch `sources` in the result: what DDP offers may differ.",
            )
        )
    if not torch.distributed or "gloo" not in torch.backends:
        missing = "torch.distributed" if not torch.distributed else "gloo"
        verdicts.append(
            error(
                "torch-distributed",
                f"This torch was built without {missing}, which ranks meet by.",
                "Install a build that has it, such as the wheels of PyPI.",
            )
        )
    return verdicts


def judge_nccl(software: Software) -> list[Verdict]:
    """Judges NCCL: what is loaded against what was compiled against and what is installed."""
    torch, wheels = software.torch, software.nccl_wheels
    if torch.version is None:
        return [not_applicable("nccl", "NCCL: torch could not be asked.")]
    if torch.hip is not None:
        return [not_applicable("nccl", "NCCL: this torch uses ROCm's RCCL.")]
    if torch.cuda is None:
        also = f" {_names(wheels)} is not used." if wheels else ""
        return [not_applicable("nccl", f"NCCL: this torch is for CPUs and has gloo only.{also}")]
    if "nccl" not in torch.backends:
        return [
            warning(
                "nccl",
                "This torch was built without NCCL: GPUs would talk over gloo, which is slow.",
                "Install a CUDA build of torch for Linux.",
            )
        ]
    loaded, built = torch.nccl_loaded, torch.nccl_built
    if loaded is None:
        first = ok("nccl", f"NCCL {built or '?'}, linked into torch.")
    elif built is not None and _release(loaded) < _release(built):
        first = warning(
            "nccl",
            f"NCCL {loaded} is loaded from {torch.nccl_path}, older than {built}, which torch was "
            "compiled against: functions may be missing.",
            f"Reinstall torch's own wheel ({_expected(torch)}), and take other folders with "
            "libnccl.so.2 out of LD_LIBRARY_PATH and LD_PRELOAD.",
            _MISSING_SYMBOL,
        )
    else:
        first = ok("nccl", f"NCCL {loaded} is loaded from {torch.nccl_path}.")
    return [first, *_judge_wheels(torch, wheels)]


def _judge_wheels(torch: TorchFacts, wheels: tuple[Wheel, ...]) -> list[Verdict]:
    id = "nccl-wheels"
    if not wheels:
        return [not_applicable(id, "No wheel of NCCL is installed: it comes with torch or system.")]
    if len(wheels) > 1:
        keep = _expected(torch)
        return [
            warning(
                id,
                f"{_names(wheels)} are installed together. They put their library in the same "
                "place, and the one that was installed last is loaded.",
                f"Uninstall all of them, then reinstall {keep}, which torch {torch.version} needs.",
                TWO_WHEELS,
            )
        ]
    wheel = wheels[0]
    number = _NAME_OF_WHEEL.fullmatch(wheel.name)
    if number and torch.cuda and number[1] != torch.cuda.split(".")[0]:
        return [
            warning(
                id,
                f"{wheel.name} is for CUDA {number[1]}, and torch was built with {torch.cuda}.",
                f"Uninstall {wheel.name} and install {_expected(torch)}.",
                TWO_WHEELS,
            )
        ]
    loaded = torch.nccl_loaded
    if loaded is not None and _release(loaded) != _release(wheel.version):
        elsewhere = torch.nccl_path is not None and not _same(torch.nccl_path, wheel.library)
        why = (
            f"NCCL {loaded} is loaded from another place ({torch.nccl_path})"
            if elsewhere
            else f"its library says {loaded}"
        )
        remedy = (
            "Take that folder out of LD_LIBRARY_PATH and LD_PRELOAD, or uninstall the wheel."
            if elsewhere
            else f"Reinstall it: pip install --force-reinstall --no-deps "
            f"{wheel.name}=={wheel.version}"
        )
        message = f"{wheel.name} {wheel.version} is installed, but {why}."
        return [warning(id, message, remedy)]
    return [ok(id, f"{wheel.name} {wheel.version} is what is installed.")]


def _expected(torch: TorchFacts) -> str:
    return f"nvidia-nccl-cu{(torch.cuda or '?').split('.')[0]}"


def _names(wheels: Sequence[Wheel]) -> str:
    return " and ".join(f"{wheel.name} {wheel.version}" for wheel in wheels)


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _release(text: str) -> tuple[int, ...]:
    try:
        return (*Version(text).release, 0, 0)[:3]
    except InvalidVersion:
        return (0, 0, 0)


def _wanted_torch() -> str | None:
    try:
        lines = importlib.metadata.requires("ddp-profiler") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "torch" and requirement.marker is None:
            return ",".join(sorted((str(part) for part in requirement.specifier), reverse=True))
    return None


def _nccl_wheels() -> tuple[Wheel, ...]:
    found: dict[str, Wheel] = {}
    for distribution in importlib.metadata.distributions():
        # A folder that an interrupted installation left has no name.
        name = distribution.metadata["Name"] or ""
        if _NAME_OF_WHEEL.fullmatch(name):
            library = distribution.locate_file("nvidia/nccl/lib/libnccl.so.2")
            found.setdefault(name, Wheel(name, distribution.version, str(library)))
    return tuple(found[name] for name in sorted(found))
