"""Another NCCL than torch's own: whether a file is one that fits, and a start with it.

Torch's wheels link ``libnccl.so.2`` dynamically. The loader takes a library of that name which
is loaded already, before it looks where torch points to: so the worker starts itself once more
with the file in ``LD_PRELOAD``, before anything has imported torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_profiler.errors import UsageError
from ddp_profiler.measure import torch_probe

STARTED_WITH = "DDP_PROFILER_NCCL"
"""Variable that holds the file that this process was started with."""
PRELOAD = "LD_PRELOAD"

_SONAME = "libnccl.so.2"
_ASK_LIMIT_S = 60.0
_ASK = (
    "import ctypes, sys; n = ctypes.c_int(); f = ctypes.CDLL(sys.argv[1]).ncclGetVersion; "
    "print(f(ctypes.byref(n)), n.value)"
)
_STATED = re.compile(rb"NCCL version \d+\.\d+\.\d+\S{0,40}?\+cuda(\d+)\.(\d+)")
"""What each build of NCCL holds, for its log: ``NCCL version 2.32.3+cuda12.9``."""
_OWN = "Leave --nccl out to use torch's own."


@dataclass(frozen=True)
class Library:
    """A file of NCCL.

    Attributes:
        path: Its absolute path, links resolved.
        version: What it states of itself.
        cuda: CUDA version that it was built for; None where the file does not say.
    """

    path: str
    version: str
    cuda: str | None


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, as far as it can be told without importing it.

    Attributes:
        version: Its version.
        cuda: CUDA version that it was built for; None for builds without.
        folder: Where it is.
    """

    version: str
    cuda: str | None
    folder: Path


def read_torch_build() -> TorchBuild:
    """Reads the file in which torch keeps its versions.

    Raises:
        UsageError: Torch is not installed.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UsageError("torch is not installed.", "pip install torch")
    folder = Path(found.origin).parent
    told = runpy.run_path(str(folder / "version.py"))
    return TorchBuild(str(told.get("__version__", "?")), told.get("cuda"), folder)


def examine(path: Path) -> Library:
    """Finds out whether a file is an NCCL, and which.

    It is loaded by a process of its own: whatever that does, it does not do here.

    Raises:
        UsageError: It is none that can be loaded.
    """
    if not path.is_file():
        what = "that is a folder" if path.is_dir() else "there is no such file"
        raise UsageError(
            f"--nccl {path}: {what}.",
            f"Name the {_SONAME} itself, as in .../nvidia/nccl/lib/{_SONAME}.",
        )
    resolved = str(path.resolve())
    version, problem = _ask_version(resolved)
    if version is None:
        raise UsageError(
            f"--nccl {path} is no NCCL that can be loaded: {problem}.",
            f"Name the {_SONAME} itself, as in .../nvidia/nccl/lib/{_SONAME}.",
        )
    return Library(resolved, version, _stated_cuda(resolved))


def check_fits(library: Library, torch: TorchBuild) -> None:
    """Refuses an NCCL that this torch cannot use.

    Raises:
        UsageError: Torch has no CUDA, or of another major version than the NCCL was built for.
    """
    if torch.cuda is None:
        raise UsageError(
            f"--nccl needs a torch with CUDA; {torch.version} was built without.",
            f"Install a CUDA build of torch on a machine with NVIDIA GPUs. {_OWN}",
        )
    if library.cuda is not None and _major(library.cuda) != _major(torch.cuda):
        raise UsageError(
            f"--nccl {library.path} is NCCL {library.version} for CUDA {library.cuda}, but torch "
            f"{torch.version} is built for CUDA {torch.cuda}.",
            f"Take the file of nvidia-nccl-cu{_major(torch.cuda)}. {_OWN}",
        )


def use(
    path: Path,
    *,
    torch_build: Callable[[], TorchBuild] = read_torch_build,
    execve: Callable[[str, list[str], Mapping[str, str]], Any] = os.execve,
) -> None:
    """Makes sure that torch uses this NCCL: starts this process once more where it does not yet.

    Process id, arguments, environment and open files stay, so that a launcher sees no change.
    Call it before torch is imported.

    Args:
        path: The ``libnccl.so.2``.
        torch_build: Tells which torch is installed.
        execve: Starts another program in this process.

    Raises:
        UsageError: The file is no NCCL, does not fit this torch, or torch does not use it.
    """
    resolved = str(path.resolve())
    before = [*filter(None, re.split(r"[\s:]+", os.environ.get(PRELOAD, "")))]
    if os.environ.get(STARTED_WITH) == resolved and resolved in before:
        _check_used(resolved)
        return
    build = torch_build()
    if build.cuda is None:
        # Before the file is loaded: nothing would use it.
        check_fits(Library(resolved, "", None), build)
    library = examine(path)
    check_fits(library, build)
    if re.search(r"[\s:]", resolved):
        raise UsageError(
            f"--nccl {resolved}: a path with a space or colon cannot be in {PRELOAD}.",
            "Make a link to it, or copy it, elsewhere.",
        )
    preload = ":".join([resolved, *(entry for entry in before if entry != resolved)])
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    environ = {**os.environ, PRELOAD: preload, STARTED_WITH: resolved}
    execve(sys.executable, sys.orig_argv, environ)


def in_use() -> tuple[str | None, str | None]:
    """Returns version and path of the NCCL that torch calls in this process.

    ``torch.cuda.nccl.version()`` tells the one that torch was compiled against. Both are None
    where torch holds NCCL inside itself, or there is none.
    """
    import torch

    path = provider(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    if path is None:
        return None, None
    try:
        return torch_probe.ask_nccl(path), path
    except (OSError, AttributeError):
        return None, path


def provider(library: str) -> str | None:
    """Returns the file whose ``ncclGetVersion`` a shared library calls; None for no other file.

    Args:
        library: Path of a library, as torch's ``libtorch_cuda.so``.
    """
    if not Path(library).is_file():
        return None
    try:
        # Looked for in the library itself and in what it is linked to, as these are loaded now.
        function = ctypes.CDLL(library).ncclGetVersion
    except (OSError, AttributeError):
        return None
    told = _SymbolPlace()
    address = ctypes.cast(function, ctypes.c_void_p)
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolPlace)]
    if not dladdr(address, ctypes.byref(told)) or not told.file:
        return None
    found = Path(os.fsdecode(told.file)).resolve()
    return None if found == Path(library).resolve() else str(found)


class _SymbolPlace(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _check_used(resolved: str) -> None:
    """Refuses to go on where torch does not call the file that this process was started with."""
    try:
        import torch
    except ImportError as error:
        if "nccl" not in str(error).lower():
            raise
        raise UsageError(
            f"torch cannot be imported with --nccl {resolved}: {str(error).splitlines()[0]}.",
            f"It is likely older than what torch was built with. {_OWN}",
        ) from error
    if not torch.cuda.device_count():
        raise UsageError(
            f"--nccl needs NVIDIA GPUs; torch {torch.__version__} sees none here.", _OWN
        )
    version, path = in_use()
    if path != resolved:
        where = f"uses NCCL {version or '?'} of {path}" if path else "holds NCCL inside itself"
        raise UsageError(
            f"--nccl {resolved} has no effect: torch {torch.__version__} {where}.",
            f"A torch that is linked to {_SONAME} is needed, as those of PyPI are. {_OWN}",
        )


def _ask_version(resolved: str) -> tuple[str | None, str]:
    """Returns the version, or None and why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _ASK, resolved],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"it did not tell its version within {_ASK_LIMIT_S:g} s"
    answer = done.stdout.split()
    if done.returncode == 0 and len(answer) == 2 and answer[0] == "0" and answer[1].isdigit():
        return torch_probe.nccl_version(int(answer[1])), ""
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return None, f"loading it ended a process by signal {-done.returncode}"
    return None, lines[-1].partition(": ")[2] if lines else "ncclGetVersion failed"


def _stated_cuda(resolved: str) -> str | None:
    with (
        Path(resolved).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        found = _STATED.search(content)
        return f"{found[1].decode()}.{found[2].decode()}" if found else None


def _major(version: str) -> str:
    return version.partition(".")[0]
