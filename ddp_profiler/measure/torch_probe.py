"""What torch says of itself, as JSON on stdout; run as a script in a process of its own.

Whatever happens at the import of torch (it is missing, a library crashes, a driver hangs)
happens to this process only. It imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import warnings
from pathlib import Path
from typing import Any

MARK = "ddp-profiler-torch-facts: "
"""What the line with the facts begins with: other libraries may print too."""


def probe() -> dict[str, Any]:
    """Returns the facts; a torch that cannot be imported is one of them."""
    try:
        import torch
    except ModuleNotFoundError as missing:
        if missing.name == "torch":
            return {"installed": False}
        return {"problem": f"{type(missing).__name__}: {missing}"}
    except BaseException as broken:
        return {"problem": f"{type(broken).__name__}: {broken}"}
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "path": str(Path(torch.__file__).parent),
    }
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        facts["distributed"] = dist.is_available()
        if facts["distributed"]:
            facts["backends"] = [
                name
                for name, there in (
                    ("gloo", dist.is_gloo_available()),
                    ("nccl", dist.is_nccl_available()),
                )
                if there
            ]
    with warnings.catch_warnings(record=True) as said, contextlib.suppress(Exception):
        warnings.simplefilter("always")
        facts["cuda_available"] = torch.cuda.is_available()
        facts["device_count"] = torch.cuda.device_count()
        facts["architectures"] = list(torch.cuda.get_arch_list())
        facts["uuids"] = [
            str(torch.cuda.get_device_properties(index).uuid)
            for index in range(facts["device_count"])
        ]
    facts["cuda_problem"] = str(said[-1].message).strip().splitlines()[0] if said else None
    if "nccl" in facts.get("backends", ()) and facts["cuda"] is not None:
        with contextlib.suppress(Exception):
            # The version that torch was compiled against; what is loaded may be another one.
            version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            facts["nccl_built"] = ".".join(map(str, version))
        with contextlib.suppress(Exception):
            facts["nccl_path"] = loaded_library(Path("/proc/self/maps").read_text())
            facts["nccl_loaded"] = ask_nccl(facts["nccl_path"])
    return facts


def loaded_library(maps: str, name: str = "libnccl") -> str | None:
    """Returns the path of a shared library that a process has loaded.

    Args:
        maps: Content of its ``/proc/PID/maps``.
        name: What the file's name begins with, followed by ``.so``.
    """
    found = re.search(rf"\s(/\S*/{re.escape(name)}\.so\S*)$", maps, flags=re.MULTILINE)
    return found[1] if found else None


def ask_nccl(path: str | None) -> str | None:
    """Returns the version that a loaded NCCL states of itself."""
    if path is None:
        return None
    number = ctypes.c_int()
    if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    return nccl_version(number.value)


def nccl_version(number: int) -> str:
    """Returns NCCL's number of its version as text.

    >>> nccl_version(22805), nccl_version(2708)
    ('2.28.5', '2.7.8')
    """
    # From 2.9 on the minor version has two digits.
    unit = 10_000 if number >= 10_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


if __name__ == "__main__":
    print(MARK + json.dumps(probe()), flush=True)  # noqa: T201 - a program of its own
