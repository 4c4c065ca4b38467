"""The one rule for what a row of a trace is: a collective, computation, memory or waiting.

Nothing else in the package looks at names of kernels or categories.
"""

from __future__ import annotations

import re
from enum import IntEnum, StrEnum
from functools import lru_cache


class Row(IntEnum):
    """What a row of a trace tells, by its category."""

    OTHER = 0
    KERNEL = 1
    MEMORY = 2
    SYNC = 3
    LAUNCH = 4
    OPERATOR = 5
    ANNOTATION = 6
    GPU_ANNOTATION = 7


class Work(IntEnum):
    """What a piece of GPU work is."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2


class Collective(StrEnum):
    """Kinds of collectives; point-to-point messages count as one kind."""

    ALL_REDUCE = "AllReduce"
    REDUCE_SCATTER = "ReduceScatter"
    ALL_GATHER = "AllGather"
    ALL_TO_ALL = "AllToAll"
    BROADCAST = "Broadcast"
    REDUCE = "Reduce"
    GATHER = "Gather"
    SCATTER = "Scatter"
    SEND_RECV = "SendRecv"
    BARRIER = "Barrier"
    UNKNOWN = "Unknown"


KINDS: tuple[Collective, ...] = tuple(Collective)
"""Collectives by their number in columns."""

_ROWS = {
    "kernel": Row.KERNEL,
    "gpu_memcpy": Row.MEMORY,
    "gpu_memset": Row.MEMORY,
    "memcpy": Row.MEMORY,
    "memset": Row.MEMORY,
    "cuda_runtime": Row.LAUNCH,
    "cuda_driver": Row.LAUNCH,
    "hip_runtime": Row.LAUNCH,
    "hip_driver": Row.LAUNCH,
    "runtime": Row.LAUNCH,
    "driver": Row.LAUNCH,
    "cpu_op": Row.OPERATOR,
    "operator": Row.OPERATOR,
    "user_annotation": Row.ANNOTATION,
    "gpu_user_annotation": Row.GPU_ANNOTATION,
    "cuda_sync": Row.SYNC,
    "hip_sync": Row.SYNC,
}

# Before brackets and templates: their types would make every kernel of a library that mentions
# ncclWork or a reduction look like a collective.
_HEAD = re.compile(r"^(?:[^<(]|\(anonymous namespace\)|<unnamed>)*", re.IGNORECASE)

# NCCL, RCCL, MSCCL and oneCCL have their name in that of each of their kernels, in every
# generation. The others are kernels of serving engines, PyTorch's symmetric memory and NVSHMEM.
_LIBRARY = re.compile(
    r"(?:nccl|rccl|msccl|oneccl)"
    r"|cross_device_reduce_\dstage"
    r"|(?:one|two)_?shot_?all_?reduce|all_?reduce_(?:one|two)_?shot"
    r"|multimem_(?:\w*_)?(?:all_?reduce|all_?gather|reduce_?scatter)"
    r"|all_?reduce_fusion_kernel"
    r"|aiter::\w*(?:all_?reduce|all_?gather|reduce_?scatter)"
    r"|quickreduce::"
    r"|userbuffers_"
    r"|deep_?ep::.*(?:dispatch|combine)"
    r"|^(?:void )?nvshmem"
)

_ALIKE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all")

# The first that is found counts, so the longer names come first.
_KINDS = (
    (re.compile(r"reduce_?scatter|userbuffers_\w*_rs(?:_|\b)"), Collective.REDUCE_SCATTER),
    (re.compile(r"all_?gather|userbuffers_\w*_ag(?:_|\b)"), Collective.ALL_GATHER),
    (re.compile(r"all_?to_?all|a2a|dispatch|combine"), Collective.ALL_TO_ALL),
    (
        re.compile(r"all_?reduce|cross_device_reduce|userbuffers_\w*sum_inplace"),
        Collective.ALL_REDUCE,
    ),
    (re.compile(r"send|recv|p2p"), Collective.SEND_RECV),
    (re.compile(r"broadcast|bcast"), Collective.BROADCAST),
    (re.compile(r"barrier"), Collective.BARRIER),
    (re.compile(r"gather"), Collective.GATHER),
    (re.compile(r"scatter"), Collective.SCATTER),
    (re.compile(r"reduce(?!d_op|op)"), Collective.REDUCE),
)

_COPY = re.compile(
    r"^(?:memcpy|memset|copy(?:host|device|peer)to|hipmemcpy|hipmemset|fillbuffer"
    r"|__amd_rocclr_(?:copy|fill))"
)
_SYNC = re.compile(r"^(?:stream|event|context|device) (?:sync|wait)|^stream wait event")
_LAUNCH = re.compile(r"launch|memcpy|memset|memprefetch|copykernel", re.IGNORECASE)
_HOST_COLLECTIVE = re.compile(r"^(?:gloo|mpi|ucc):(\w+)")
_DISTRIBUTED = re.compile(r"^(?:c10d::|record_param_comms|nccl:|_c10d_functional::)")
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_OPTIMIZER = re.compile(r"^Optimizer\.step#")


@lru_cache(maxsize=4096)
def row(category: str) -> Row:
    """Returns what rows of a category tell, for old and new names of categories.

    >>> row("Kernel"), row("gpu_memcpy"), row("Runtime"), row("ac2g")
    (<Row.KERNEL: 1>, <Row.MEMORY: 2>, <Row.LAUNCH: 4>, <Row.OTHER: 0>)
    """
    known = _ROWS.get(category.lower())
    if known is not None:
        return known
    # Other devices' names end alike: xpu_runtime, privateuse1_driver, mtia_sync.
    for end, kind in (("_runtime", Row.LAUNCH), ("_driver", Row.LAUNCH), ("_sync", Row.SYNC)):
        if category.lower().endswith(end):
            return kind
    return Row.OTHER


@lru_cache(maxsize=65536)
def work(name: str, collective_name: str = "") -> tuple[Work | None, Collective | None]:
    """Returns what a kernel does, and for communication which collective it belongs to.

    What a trace itself says about a kernel (``Collective name`` among its arguments) goes
    before the name: NCCL's generic kernels serve several collectives, and an all-to-all
    runs as SendRecv. Upper and lower case make no difference.

    >>> work("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    (<Work.COMMUNICATION: 1>, <Collective.ALL_REDUCE: 'AllReduce'>)
    >>> work("void at::native::reduce_kernel<512, 1, ncclSum>(float*)")
    (<Work.COMPUTE: 0>, None)
    >>> work("Stream Wait Event")
    (None, None)

    Args:
        name: Name of the kernel, demangled or not.
        collective_name: What the arguments call the collective; empty where they do not.

    Returns:
        The work, None for rows of waiting, which are no work; and the collective's kind.
    """
    lower = name.lower()
    found = _HEAD.match(lower)
    head = found[0] if found else lower
    if _SYNC.match(head):
        return None, None
    if collective_name or _LIBRARY.search(head):
        said = kind(collective_name)
        return Work.COMMUNICATION, said if said != Collective.UNKNOWN else kind(head)
    return (Work.MEMORY if _COPY.match(head) else Work.COMPUTE), None


@lru_cache(maxsize=4096)
def kind(name: str) -> Collective:
    """Returns the kind of collective that a name speaks of.

    >>> kind("_allgather_base").value, kind("nccl:all_to_all").value, kind("Generic").value
    ('AllGather', 'AllToAll', 'Unknown')
    """
    lower = name.lower()
    for pattern, collective in _KINDS:
        if pattern.search(lower):
            return collective
    return Collective.UNKNOWN


def looks_like_collective(name: str) -> bool:
    """Returns whether a kernel that is not known as a collective is named like one.

    >>> looks_like_collective("my_lib_allreduce_sum"), looks_like_collective("gemm")
    (True, False)
    """
    found = _HEAD.match(name.lower())
    return found is not None and _ALIKE.search(found[0]) is not None


@lru_cache(maxsize=4096)
def launches(name: str) -> bool:
    """Returns whether a call of the runtime hands work to the GPU.

    >>> launches("cudaLaunchKernelExC"), launches("hipMemcpyAsync"), launches("cudaEventQuery")
    (True, True, False)
    """
    return _LAUNCH.search(name) is not None


def host_collective(name: str) -> Collective | None:
    """Returns the kind of a collective that runs on the CPU; None for other rows.

    >>> host_collective("gloo:all_reduce")
    <Collective.ALL_REDUCE: 'AllReduce'>
    """
    found = _HOST_COLLECTIVE.match(name)
    return kind(found[1]) if found else None


def is_distributed(name: str) -> bool:
    """Returns whether a row on the CPU hands a collective to torch.distributed or NCCL.

    >>> is_distributed("c10d::allreduce_"), is_distributed("aten::add")
    (True, False)
    """
    return _DISTRIBUTED.match(name) is not None


def step_number(name: str) -> int | None:
    """Returns N of an annotation ``ProfilerStep#N``; None for other rows."""
    found = _STEP.match(name)
    return int(found[1]) if found else None


def is_optimizer_step(name: str) -> bool:
    """Returns whether an annotation is that of a call of an optimizer's step."""
    return _OPTIMIZER.match(name) is not None
