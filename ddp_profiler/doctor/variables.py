"""Variables that are known to make training slow or unsafe, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_profiler.doctor.verdict import Verdict, not_applicable, ok, warning

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TORCH_NCCL = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"
_BLOCKING = "https://github.com/pytorch/pytorch/issues/50820"
_TIMING = "https://github.com/pytorch/pytorch/issues/143890"
_LAUNCH = "https://discuss.pytorch.org/t/160924"
_CONNECTIONS = "https://github.com/pytorch/torchtitan/issues/1147"
_CUDA = "https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"
_TLS = "https://github.com/pytorch/pytorch/pull/56442"
_ENOUGH_SHOWN = 60

_ON = r"(?i)1|y|yes|t|true|on"
_SET = r".+"


@dataclass(frozen=True)
class Hurting:
    """A variable that hurts.

    Attributes:
        name: The variable.
        values: Regular expression that its whole value must match to hurt.
        effect: What it does.
        remedy: What to do.
        source: Where that is known from.
        needs: What must be there for it to matter: ``gpu``, ``rdma`` or nothing.
    """

    name: str
    values: str
    effect: str
    remedy: str
    source: str
    needs: str = ""


def _unset(name: str) -> str:
    return f"unset {name}"


HURTING = (
    Hurting(
        "NCCL_P2P_DISABLE",
        _ON,
        "GPUs of a node do not use NVLink or PCIe directly, but host memory.",
        _unset("NCCL_P2P_DISABLE"),
        _NCCL,
        "gpu",
    ),
    Hurting(
        "NCCL_P2P_LEVEL",
        r"(?i)LOC|0",
        "GPUs of a node never use NVLink or PCIe directly.",
        _unset("NCCL_P2P_LEVEL"),
        _NCCL,
        "gpu",
    ),
    Hurting(
        "NCCL_SHM_DISABLE",
        _ON,
        "GPUs that cannot reach each other directly use the network instead of shared memory.",
        _unset("NCCL_SHM_DISABLE"),
        _NCCL,
        "gpu",
    ),
    Hurting(
        "NCCL_IB_DISABLE",
        _ON,
        "NCCL uses TCP although there is InfiniBand or RoCE.",
        _unset("NCCL_IB_DISABLE"),
        _NCCL,
        "rdma",
    ),
    Hurting(
        "NCCL_NET",
        r"(?i)socket",
        "NCCL uses TCP although there is InfiniBand or RoCE.",
        _unset("NCCL_NET"),
        _NCCL,
        "rdma",
    ),
    Hurting(
        "NCCL_NET_GDR_LEVEL",
        r"(?i)LOC|0",
        "What passes between nodes is copied through host memory.",
        _unset("NCCL_NET_GDR_LEVEL"),
        _NCCL,
        "rdma",
    ),
    Hurting(
        "NCCL_ALGO",
        _SET,
        "NCCL may not choose its algorithm by size and topology.",
        "unset NCCL_ALGO, which is meant for tests",
        _NCCL,
        "gpu",
    ),
    Hurting(
        "NCCL_PROTO",
        _SET,
        "NCCL may not choose its protocol; LL128 where it is not safe corrupts data.",
        "unset NCCL_PROTO, which is meant for tests",
        _NCCL,
        "gpu",
    ),
    Hurting(
        "NCCL_DEBUG",
        r"(?i)INFO|TRACE",
        "NCCL writes much into the log, TRACE for each call.",
        "export NCCL_DEBUG=WARN, once what you looked for is found",
        _NCCL,
        "gpu",
    ),
    Hurting(
        "TORCH_DISTRIBUTED_DEBUG",
        r"(?i)DETAIL",
        "each collective is first checked between ranks, by collectives of its own.",
        _unset("TORCH_DISTRIBUTED_DEBUG"),
        _DISTRIBUTED,
    ),
    Hurting(
        "TORCH_NCCL_BLOCKING_WAIT",
        _ON,
        "the host waits for each collective, and can prepare nothing meanwhile.",
        _unset("TORCH_NCCL_BLOCKING_WAIT"),
        _BLOCKING,
        "gpu",
    ),
    Hurting(
        "NCCL_BLOCKING_WAIT",
        _ON,
        "the host waits for each collective, and can prepare nothing meanwhile.",
        "unset NCCL_BLOCKING_WAIT (the old name of TORCH_NCCL_BLOCKING_WAIT)",
        _BLOCKING,
        "gpu",
    ),
    Hurting(
        "TORCH_NCCL_ENABLE_TIMING",
        _ON,
        "events around each collective are reported to keep it from overlapping with compute.",
        _unset("TORCH_NCCL_ENABLE_TIMING"),
        _TIMING,
        "gpu",
    ),
    Hurting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        r"0",
        "a collective that fails on one rank lets the others hang.",
        _unset("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        _TORCH_NCCL,
        "gpu",
    ),
    Hurting(
        "CUDA_LAUNCH_BLOCKING",
        _ON,
        "the host waits for each kernel: nothing overlaps.",
        _unset("CUDA_LAUNCH_BLOCKING"),
        _LAUNCH,
        "gpu",
    ),
    Hurting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        r"1",
        "streams share one queue, and gradients may wait behind compute; Megatron's tensor "
        "parallelism wants it, data parallelism does not.",
        _unset("CUDA_DEVICE_MAX_CONNECTIONS"),
        _CONNECTIONS,
        "gpu",
    ),
    Hurting(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _SET,
        "memory is asked of the driver for each tensor, which waits for the GPU.",
        _unset("PYTORCH_NO_CUDA_MEMORY_CACHING"),
        _CUDA,
        "gpu",
    ),
    Hurting(
        "NVIDIA_TF32_OVERRIDE",
        r"0",
        "matrix products in fp32 may not use TF32, whatever torch is told.",
        _unset("NVIDIA_TF32_OVERRIDE"),
        _CUDA,
        "gpu",
    ),
    Hurting(
        "GLOO_DEVICE_TRANSPORT",
        r"(?i)TCP_TLS",
        "gloo encrypts what ranks exchange, on the processor.",
        "unset GLOO_DEVICE_TRANSPORT on a network that you trust",
        _TLS,
    ),
)
"""What is looked for, in the order in which it is shown."""


def judge_variables(environ: Mapping[str, str], *, gpu: bool, rdma: bool) -> list[Verdict]:
    """Judges the environment.

    Args:
        environ: Variables.
        gpu: Whether there is a GPU: NCCL's and CUDA's variables matter only then.
        rdma: Whether there is an adapter of InfiniBand or RoCE.
    """
    there = {"": True, "gpu": gpu, "rdma": rdma}
    verdicts, idle = [], []
    for entry in HURTING:
        value = environ.get(entry.name, "")
        if not re.fullmatch(entry.values, value.strip()):
            continue
        if not there[entry.needs]:
            idle.append(entry.name)
            continue
        shown = value if len(value) <= _ENOUGH_SHOWN else f"{value[:_ENOUGH_SHOWN]}..."
        verdicts.append(
            warning(
                f"variable-{entry.name}",
                f"{entry.name}={shown}: {entry.effect}",
                entry.remedy,
                entry.source,
            )
        )
    if idle:
        verdicts.append(
            not_applicable("variables-idle", f"Without effect here: {', '.join(idle)}.")
        )
    if not verdicts:
        verdicts.append(
            ok("variables", f"None of {len(HURTING)} variables that are known to hurt is set.")
        )
    return verdicts
