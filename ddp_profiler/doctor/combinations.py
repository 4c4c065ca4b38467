"""Combinations that are known to hang or to be slow, each with its source."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from ddp_profiler.doctor.verdict import Verdict, not_applicable, ok, warning


@dataclass(frozen=True)
class Setting:
    """What combinations are looked for in; None or empty where not known.

    Attributes:
        kernel: Release of the Linux kernel; None on another system.
        machine: As ``uname -m`` has it.
        driver: Version of NVIDIA's driver.
        gpus: Names of the GPUs.
        nccl: Version that is loaded.
        torch: Its version.
    """

    kernel: str | None = None
    machine: str = ""
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    nccl: str | None = None
    torch: str | None = None


@dataclass(frozen=True)
class Combination:
    """One that is known.

    Attributes:
        id: Its name.
        holds: Whether a setting is one.
        message: What happens, with ``{setting.NAME}`` filled in.
        remedy: What to do.
        source: Where it is known from.
    """

    id: str
    holds: Callable[[Setting], bool]
    message: str
    remedy: str
    source: str


def _below(version: str | None, limit: str) -> bool:
    """Tells whether a version is known and lower; of a kernel's release the numbers count."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    try:
        return numbers is not None and Version(numbers[0]) < Version(limit)
    except InvalidVersion:
        return False


def _is(version: str | None, wanted: str) -> bool:
    return version is not None and version.split("+")[0] == wanted


KNOWN = (
    Combination(
        "kernel-5.5",
        lambda s: _below(s.kernel, "5.5"),
        "Linux {setting.kernel}: processes of a job were seen to hang on kernels before 5.5 (those "
        "of distributions may have the mending all the same).",
        "If ranks hang at their start, try a newer kernel.",
        "https://github.com/huggingface/accelerate/issues/1929",
    ),
    Combination(
        "rtx40-driver",
        lambda s: (
            len(s.gpus) > 1
            and any("RTX 40" in name for name in s.gpus)
            and _below(s.driver, "550.40.07")
        ),
        "GPUs of the RTX 40 series with driver {setting.driver}: NCCL was seen to hang, since "
        "direct access between them was offered and did not work; Accelerate trusts 550.40.07 and "
        "later.",
        "Update the driver, or export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1.",
        "https://github.com/NVIDIA/nccl-tests/issues/117",
    ),
    Combination(
        "nccl-2.29.2",
        lambda s: _is(s.nccl, "2.29.2"),
        "NCCL 2.29.2 has a regression that hangs.",
        "Install nvidia-nccl 2.29.3 or later, or the version that torch came with.",
        "https://github.com/pytorch/pytorch/pull/174338",
    ),
    Combination(
        "nccl-arm",
        lambda s: bool(s.gpus) and s.machine == "aarch64" and _below(s.nccl, "2.29.3"),
        "NCCL {setting.nccl} on ARM: before 2.29.3 it can lose slots for transfers between nodes, "
        "until all ranks hang at full load.",
        "Install nvidia-nccl 2.29.3 or later.",
        "https://github.com/marin-community/marin/pull/8038",
    ),
    Combination(
        "torch-2.7.0-nonblocking",
        lambda s: bool(s.gpus) and s.torch is not None and _is(s.torch, "2.7.0"),
        "torch 2.7.0 with device_id given to init_process_group hangs now and then.",
        "Update torch, or export TORCH_NCCL_USE_COMM_NONBLOCKING=0.",
        "https://github.com/pytorch/pytorch/issues/153960",
    ),
)
"""What is looked for. Two wheels of NCCL and a driver too old for CUDA are judged where those
are read."""


def judge_combinations(setting: Setting) -> list[Verdict]:
    """Judges whether this machine is one of the known combinations."""
    verdicts = [
        warning(known.id, known.message.format(setting=setting), known.remedy, known.source)
        for known in KNOWN
        if known.holds(setting)
    ]
    if verdicts:
        return verdicts
    if setting.kernel is None and not setting.gpus:
        return [not_applicable("combinations", "Known bad combinations: nothing to look at.")]
    return [ok("combinations", f"None of {len(KNOWN)} known bad combinations is here.")]
