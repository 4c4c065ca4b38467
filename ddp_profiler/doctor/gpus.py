"""GPUs and the links between them, through nvidia-ml-py; works without torch."""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
from packaging.version import Version

from ddp_profiler import units
from ddp_profiler.doctor.software import TorchFacts
from ddp_profiler.doctor.verdict import Verdict, error, not_applicable, ok, warning
from ddp_profiler.measure.nvidia import CLOCK_REASONS, NvidiaGpu

COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"
_NCCL_TROUBLE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}
"""Oldest driver for each major version of CUDA, as NVIDIA's page on compatibility has it."""

# What the driver does to a GPU that works; the first two of CLOCK_REASONS are settings.
_HURTING_REASONS = 0x008 | 0x020 | 0x040 | 0x080
_PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_PATH_WORDS = {
    "NVLink": "over NVLink",
    "same board": "on the same board",
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the host bridge of a CPU",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
}
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: The driver's number of it.
        name: The product.
        uuid: Its own name; None where not known.
        memory_bytes: Its memory.
        used_bytes: Of it in use.
        processes: How many processes compute on it that are not of this examination.
        capability: Compute capability, as ``9.0``.
        exclusive: Compute mode: ``prohibited``, ``exclusive`` or None for the usual one.
        mig: Whether it is divided by MIG.
        uncorrected_errors: Memory errors since the driver was loaded that were not corrected.
        numa_node: NUMA node that it hangs on.
        readings: What :meth:`NvidiaGpu.read` returns: clocks, reasons, PCIe link.
        nvlinks: State of each NVLink that it has: whether it is up.
    """

    index: int
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    processes: int | None = None
    capability: str | None = None
    exclusive: str | None = None
    mig: bool = False
    uncorrected_errors: int | None = None
    numa_node: int | None = None
    readings: dict[str, float] | None = None
    nvlinks: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Pair:
    """The way between two GPUs.

    Attributes:
        first: Index of one.
        second: Index of the other.
        path: As ``nvidia-smi topo -m`` calls it, or ``NVLink``; None where not known.
        direct: Whether each can read the other's memory; None where not known.
    """

    first: int
    second: int
    path: str | None
    direct: bool | None


@dataclass(frozen=True)
class GpuFacts:
    """What there is in GPUs.

    Attributes:
        on_bus: Vendors of the GPUs on the PCI bus, one for each.
        library: ``ok``, or why NVIDIA's management library could not be asked.
        driver: Version of the driver.
        cuda: Newest CUDA that the driver knows, as ``13.0``.
        gpus: Each GPU.
        pairs: Each pair of them.
        own_nodes: NUMA nodes of which this process may use a core.
    """

    on_bus: tuple[str, ...] = ()
    library: str = "ok"
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    own_nodes: tuple[int, ...] = ()


def read_gpus(library: Any = None, root: Path = Path("/")) -> GpuFacts:
    """Reads what the PCI bus and NVIDIA's library say.

    Args:
        library: Stands in for ``pynvml`` in tests.
        root: Where ``sys`` is.
    """
    on_bus = _on_bus(root)
    try:
        nvml = library or importlib.import_module("pynvml")
    except ImportError:
        return GpuFacts(on_bus, library="nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except Exception as problem:  # no driver, or one of another version
        return GpuFacts(on_bus, library=str(problem) or type(problem).__name__)
    try:
        return _ask_all(nvml, on_bus, root)
    finally:
        _ask(nvml.nvmlShutdown)


def judge_gpus(facts: GpuFacts, torch: TorchFacts | None) -> list[Verdict]:
    """Judges driver and GPUs: that torch can use them, that they are alike, idle and healthy."""
    if not facts.gpus:
        return [_judge_absence(facts, torch)]
    gpus = _seen(facts.gpus, torch)
    verdicts = [_judge_driver(facts, torch), _judge_kinds(gpus)]
    if torch is not None and torch.version is not None:
        verdicts += _judge_use(facts.gpus, gpus, torch)
    for gpu in gpus:
        verdicts += _judge_state(gpu)
    away = [g for g in gpus if facts.own_nodes and g.numa_node not in (None, *facts.own_nodes)]
    if away:
        verdicts.append(
            warning(
                "gpu-numa",
                f"{_list(away)} hang on NUMA node {_distinct(g.numa_node for g in away)}, and this "
                f"process may use cores of node {_distinct(facts.own_nodes)} only.",
                "Bind each rank to the node of its GPU, such as with numactl --cpunodebind.",
            )
        )
    return verdicts


def judge_links(facts: GpuFacts, torch: TorchFacts | None) -> list[Verdict]:
    """Judges the links: NVLinks that are down, PCIe narrower than it could be, the ways between."""
    if not facts.gpus:
        return [not_applicable("gpu-links", "Links between GPUs: no GPU was read.")]
    gpus = _seen(facts.gpus, torch)
    numbers = {gpu.index for gpu in gpus}
    pairs = [pair for pair in facts.pairs if {pair.first, pair.second} <= numbers]
    return [_judge_nvlinks(gpus), *_judge_pcie(gpus), _judge_pairs(gpus, pairs)]


def _seen(gpus: tuple[Gpu, ...], torch: TorchFacts | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that torch sees; all where it sees none, or none that is known."""
    uuids = set(torch.uuids) if torch is not None else set()
    return tuple(g for g in gpus if (g.uuid or "").removeprefix("GPU-") in uuids) or gpus


def _judge_absence(facts: GpuFacts, torch: TorchFacts | None) -> Verdict:
    nvidia = facts.on_bus.count("NVIDIA")
    seen = torch.device_count if torch is not None and torch.cuda_available else 0
    if seen and torch is not None and torch.hip is not None:
        return ok("gpus", f"{seen} GPUs of AMD; their links are not read.")
    if facts.library.startswith("nvidia-ml-py") and (nvidia or seen):
        return warning(
            "gpus",
            f"{nvidia or seen} NVIDIA GPUs, which cannot be asked: {facts.library}.",
            "pip install 'ddp-profiler[gpu]'",
        )
    if nvidia:
        return warning(
            "gpus",
            f"{nvidia} NVIDIA GPUs are on the bus, and the driver does not answer "
            f"({facts.library}).",
            "Install or load the driver; in a container, start it with --gpus all.",
        )
    others = facts.on_bus.count("AMD")
    if others:
        return not_applicable("gpus", f"{others} GPUs of AMD, which are not looked at.")
    return not_applicable("gpus", "GPUs: there is none. Ranks compute on CPUs, over gloo.")


def _judge_driver(facts: GpuFacts, torch: TorchFacts | None) -> Verdict:
    id = "driver"
    what = f"driver {facts.driver or '?'}" + (f", CUDA up to {facts.cuda}" if facts.cuda else "")
    built = torch.cuda if torch is not None else None
    oldest = OLDEST_DRIVER.get(int(built.split(".")[0])) if built else None
    if oldest and facts.driver and Version(facts.driver) < Version(oldest):
        return warning(
            id,
            f"{what}; torch was built with CUDA {built}, which needs driver {oldest} or later.",
            "Update the driver, or install a torch of an older CUDA; else torch sees no GPU.",
            COMPATIBILITY,
        )
    return ok(id, f"{what}{f'; torch was built with CUDA {built}' if built else ''}.")


def _judge_kinds(gpus: Sequence[Gpu]) -> Verdict:
    kinds = Counter(f"{g.name}, {units.nbytes(g.memory_bytes)}" for g in gpus)
    what = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if len(kinds) > 1:
        return warning(
            "gpus",
            f"GPUs differ: {what}. Each step waits for the slowest.",
            "Use GPUs of one kind in a job: name them in CUDA_VISIBLE_DEVICES.",
        )
    return ok("gpus", f"{what}.")


def _judge_use(there: Sequence[Gpu], seen: Sequence[Gpu], torch: TorchFacts) -> list[Verdict]:
    id = "gpu-use"
    if torch.cuda is None:
        return [
            warning(
                id,
                f"torch is not built for CUDA and sees none of the {len(there)} GPUs.",
                "Install a CUDA build of torch: pytorch.org names the command.",
            )
        ]
    if not torch.cuda_available or not torch.device_count:
        why = torch.cuda_problem or "it says nothing about why"
        return [
            warning(
                id,
                f"torch sees none of the {len(there)} GPUs: {why}.",
                "Look at CUDA_VISIBLE_DEVICES and at the driver; a run would use CPUs and gloo.",
            )
        ]
    verdicts = [ok(id, f"torch sees {torch.device_count} of {len(there)} GPUs.")]
    codes = [int(a.removeprefix("sm_").rstrip("af")) for a in torch.architectures if "sm_" in a]
    for gpu in seen:
        if not gpu.capability or not codes:
            continue
        major, minor = (int(part) for part in gpu.capability.split("."))
        # Machine code runs on the same major version with the same or a later minor one; code
        # that is compiled at run time (compute_NN) on all later ones.
        fits = any(code // 10 == major and code % 10 <= minor for code in codes)
        later = any(
            int(a.removeprefix("compute_")) <= major * 10 + minor
            for a in torch.architectures
            if re.fullmatch(r"compute_\d+", a)
        )
        if not (fits or later):
            verdicts.append(
                error(
                    "gpu-architecture",
                    f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability}, and "
                    f"this torch has code for {', '.join(torch.architectures)} only.",
                    "Install a torch that is built for it, or leave it out of "
                    "CUDA_VISIBLE_DEVICES.",
                )
            )
    return verdicts


def _judge_state(gpu: Gpu) -> list[Verdict]:
    name = f"GPU {gpu.index}"
    verdicts = []
    if gpu.processes:
        verdicts.append(
            warning(
                "gpu-busy",
                f"{name} is used by {gpu.processes} other process"
                f"{'es' if gpu.processes > 1 else ''} ({units.nbytes(gpu.used_bytes)} in use).",
                "Wait for them, or leave it out of CUDA_VISIBLE_DEVICES.",
            )
        )
    if gpu.exclusive == "prohibited":
        verdicts.append(
            error(
                "gpu-mode",
                f"{name} is in compute mode PROHIBITED: no process may use it.",
                f"nvidia-smi -i {gpu.index} -c DEFAULT",
            )
        )
    if gpu.mig:
        verdicts.append(
            warning(
                "gpu-mig",
                f"{name} is divided by MIG: NCCL cannot join instances of one GPU, and a rank has "
                "a part of its speed.",
                "Use whole GPUs for data-parallel training.",
            )
        )
    if gpu.uncorrected_errors:
        verdicts.append(
            warning(
                "gpu-memory",
                f"{name} has had {gpu.uncorrected_errors} memory errors that were not corrected.",
                "Reset or replace it; nvidia-smi -q -d ECC shows more.",
            )
        )
    reasons = int((gpu.readings or {}).get("reasons", 0)) & _HURTING_REASONS
    if reasons:
        words = ", ".join(word for bit, word in CLOCK_REASONS.items() if reasons & bit)
        verdicts.append(
            warning(
                "gpu-clocks",
                f"The clocks of {name} are held down now: {words}.",
                "Look at cooling and power supply; the other ranks will wait for this one.",
            )
        )
    return verdicts


def _judge_nvlinks(gpus: Sequence[Gpu]) -> Verdict:
    id = "nvlink"
    if not any(gpu.nvlinks for gpu in gpus):
        return not_applicable(id, "NVLink: no GPU has any.")
    up = {gpu.index: sum(gpu.nvlinks) for gpu in gpus}
    if len(gpus) == 1:
        return ok(id, f"NVLink: {up[gpus[0].index]} links up, and one GPU.")
    most = max(up.values())
    if not most:
        return not_applicable(id, "NVLink: none is up; GPUs are not joined by it.")
    weak = [gpu for gpu in gpus if up[gpu.index] < most]
    if weak:
        counts = ", ".join(f"GPU {g.index} {up[g.index]}" for g in weak)
        return warning(
            id,
            f"NVLinks are down: {counts} of {most} that the others have. NCCL may go over PCIe.",
            "nvidia-smi nvlink -s shows which; reseat bridges or look at the fabric manager.",
        )
    return ok(id, f"NVLink: {most} links up on each of {len(gpus)} GPUs.")


def _judge_pcie(gpus: Sequence[Gpu]) -> list[Verdict]:
    known = [g for g in gpus if {"pcie_width", "pcie_width_max"} <= set(g.readings or {})]
    if not known:
        return [not_applicable("pcie", "PCIe links could not be read.")]

    def link(gpu: Gpu, suffix: str = "") -> tuple[int | None, int]:
        readings = gpu.readings or {}
        generation = readings.get(f"pcie_generation{suffix}")
        width = int(readings[f"pcie_width{suffix}"])
        return (None if generation is None else int(generation), width)

    def text(of: tuple[int | None, int]) -> str:
        return f"gen {of[0] or '?'} x{of[1]}"

    verdicts = []
    for gpu in known:
        if link(gpu)[1] < link(gpu, "_max")[1]:
            verdicts.append(
                warning(
                    "pcie",
                    f"GPU {gpu.index} has PCIe {text(link(gpu))} of {text(link(gpu, '_max'))}.",
                    "Reseat the card or riser, or look at the slot and its BIOS settings.",
                )
            )
    if verdicts:
        return verdicts
    most = Counter(text(link(gpu, "_max")) for gpu in known)
    now = Counter(text(link(gpu)) for gpu in known)
    idle = "" if most == now else f"; now {_counted(now)}, which idle GPUs lower by themselves"
    return [ok("pcie", f"PCIe {_counted(most)} at most{idle}.")]


def _judge_pairs(gpus: Sequence[Gpu], pairs: Sequence[Pair]) -> Verdict:
    id = "gpu-paths"
    if len(gpus) < 2:
        return not_applicable(id, "Ways between GPUs: there is one GPU.")
    ways = Counter(pair.path for pair in pairs if pair.path is not None)
    if not ways:
        return not_applicable(id, "Ways between GPUs could not be read.")
    what = ", ".join(
        f"{count} pair{'s' if count > 1 else ''} {_PATH_WORDS[path]}"
        for path, count in ways.most_common()
    )
    blocked = [pair for pair in pairs if pair.direct is False]
    if blocked:
        example = blocked[0]
        return warning(
            id,
            f"{what}. {len(blocked)} of {len(pairs)} pairs (such as GPU {example.first} "
            f"and {example.second}) cannot read each other's memory: NCCL goes through host "
            "memory.",
            "Look at ACS, IOMMU and the virtual machine's settings; some GPUs cannot at all.",
            _NCCL_TROUBLE,
        )
    if ways["SYS"]:
        return warning(
            id,
            f"{what}. What passes between NUMA nodes is slowest.",
            "Where fewer GPUs do, take them from one NUMA node (nvidia-smi topo -m).",
        )
    return ok(id, f"{what}.")


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a driver answers, or None: GPUs and drivers differ in what they offer."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _ask_all(nvml: Any, on_bus: tuple[str, ...], root: Path) -> GpuFacts:
    handles = [
        handle
        for index in range(nvml.nvmlDeviceGetCount())
        if (handle := _ask(nvml.nvmlDeviceGetHandleByIndex, index)) is not None
    ]
    number = _ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return GpuFacts(
        on_bus=on_bus,
        driver=_text(_ask(nvml.nvmlSystemGetDriverVersion)),
        cuda=f"{number // 1000}.{number % 1000 // 10}" if number else None,
        gpus=tuple(_ask_one(nvml, index, handle, root) for index, handle in enumerate(handles)),
        pairs=tuple(
            _ask_pair(nvml, first, second, handles[first], handles[second])
            for first, second in combinations(range(len(handles)), 2)
        ),
        own_nodes=_own_nodes(root),
    )


def _ask_one(nvml: Any, index: int, handle: Any, root: Path) -> Gpu:
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    busy = _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mode = _ask(nvml.nvmlDeviceGetComputeMode, handle)
    mig = _ask(nvml.nvmlDeviceGetMigMode, handle)
    bus = _text(getattr(_ask(nvml.nvmlDeviceGetPciInfo, handle), "busId", None))
    links = [
        _ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
    ]
    return Gpu(
        index=index,
        name=_text(_ask(nvml.nvmlDeviceGetName, handle)) or "?",
        uuid=_text(_ask(nvml.nvmlDeviceGetUUID, handle)),
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        processes=None if busy is None else sum(1 for p in busy if p.pid not in _own_processes()),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        exclusive={2: "prohibited", 3: "exclusive"}.get(mode) if isinstance(mode, int) else None,
        mig=bool(mig and mig[0]),
        uncorrected_errors=_ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
            getattr(nvml, "NVML_VOLATILE_ECC", 0),
        ),
        numa_node=_numa_node(root, bus),
        readings=NvidiaGpu(nvml, handle).read(),
        nvlinks=tuple(bool(state) for state in links if state is not None),
    )


def _ask_pair(nvml: Any, first: int, second: int, one: Any, other: Any) -> Pair:
    def status(name: str, default: int) -> bool | None:
        answer = _ask(nvml.nvmlDeviceGetP2PStatus, one, other, getattr(nvml, name, default))
        return None if answer is None else answer == 0

    ancestor = _ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    joined = status("NVML_P2P_CAPS_INDEX_NVLINK", 2)
    path = "NVLink" if joined else _PATHS.get(ancestor) if ancestor is not None else None
    return Pair(first, second, path, status("NVML_P2P_CAPS_INDEX_READ", 0))


def _own_processes() -> set[int]:
    """Returns this process and those that it started, such as the one that asks torch."""
    own = _ask(psutil.Process().children) or []
    return {os.getpid(), *(process.pid for process in own)}


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _numa_node(root: Path, bus: str | None) -> int | None:
    # The library has eight digits for the domain, the kernel four.
    name = (bus or "").lower()
    name = name[4:] if len(name.split(":")[0]) == 8 else name
    try:
        node = int((root / "sys/bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def _own_nodes(root: Path) -> tuple[int, ...]:
    if not hasattr(os, "sched_getaffinity"):
        return ()
    own = os.sched_getaffinity(0)
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            cores = parse_cores((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if own & cores:
            nodes.append(int(folder.name.removeprefix("node")))
    return tuple(sorted(nodes))


def parse_cores(text: str) -> set[int]:
    """Returns the numbers in a list of cores as the kernel writes it.

    >>> sorted(parse_cores("0-2,8"))
    [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _on_bus(root: Path) -> tuple[str, ...]:
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        # 0x03: display controllers, among them those for computing only.
        if vendor in _VENDORS and kind.startswith("0x03"):
            found.append(_VENDORS[vendor])
    return tuple(found)


def _list(gpus: Sequence[Gpu]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(str(g.index) for g in gpus)}"


def _distinct(values: Any) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def _counted(texts: Counter[str]) -> str:
    if len(texts) == 1:
        return next(iter(texts))
    return ", ".join(f"{count} x {text}" for text, count in texts.items())
