"""The examination: reads all facts at once, judges each topic, and says whether a run can start."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_profiler.doctor import gpus, host, network, software
from ddp_profiler.doctor.combinations import Setting, judge_combinations
from ddp_profiler.doctor.reading import Reader, Unread, read_all
from ddp_profiler.doctor.variables import judge_variables
from ddp_profiler.doctor.verdict import Section, Status, Verdict, warning

_SHORT_S = 5.0
_NAMES_S = 10.0
_GPUS_S = 20.0


@dataclass(frozen=True)
class Examination:
    """What was found on this node.

    Attributes:
        hostname: Its name.
        ranks: Ranks that were reckoned with on it.
        ranks_from: Where that number comes from.
        nodes: Nodes of the run; None where neither the user nor a launcher says.
        sections: Verdicts by topic.
        facts: Facts by topic, as they were read.
    """

    hostname: str
    ranks: int
    ranks_from: str
    nodes: int | None
    sections: tuple[Section, ...]
    facts: Mapping[str, Any]

    @property
    def counts(self) -> dict[Status, int]:
        """How many verdicts of each status there are."""
        found = Counter(v.status for section in self.sections for v in section.verdicts)
        order: tuple[Status, ...] = ("ok", "warning", "error", "not applicable")
        return {status: found[status] for status in order}

    @property
    def can_run(self) -> bool:
        """Whether nothing was found that makes a run impossible."""
        return not self.counts["error"]


def readers(
    out: Path, environ: Mapping[str, str] = os.environ, *, probe_limit_s: float | None = None
) -> dict[str, Reader]:
    """Returns where the facts of each topic come from, with the limit of each.

    Args:
        out: Where run folders would be written.
        environ: Variables.
        probe_limit_s: Seconds for the import of torch; None: as usual.
    """
    limit_s = probe_limit_s or software.PROBE_LIMIT_S
    return {
        # The process that imports torch ends a little before.
        "software": Reader(lambda: software.read_software(limit_s), limit_s + _SHORT_S),
        "gpus": Reader(gpus.read_gpus, _GPUS_S),
        "network": Reader(lambda: network.read_network(environ), _NAMES_S),
        "names": Reader(lambda: network.read_names(environ), _NAMES_S),
        "ports": Reader(lambda: network.read_ports(environ), _SHORT_S),
        "cores": Reader(lambda: host.read_cores(environ), _SHORT_S),
        "clock": Reader(host.read_clock, _SHORT_S),
        "disk": Reader(lambda: host.read_disk(out), _SHORT_S),
        "limits": Reader(host.read_limits, _SHORT_S),
    }


def examine(
    sources: Mapping[str, Reader],
    ranks: int | None = None,
    nodes: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Examination:
    """Reads and judges everything; never raises, and ends when the longest limit is over.

    Args:
        sources: As :func:`readers` returns them.
        ranks: That would be started on this node; None: see :func:`count_ranks`.
        nodes: Nodes of the run; None: see :func:`count_nodes`.
        environ: Variables.
    """
    return judge(read_all(sources), ranks, nodes, environ)


def judge(
    facts: Mapping[str, Any],
    ranks: int | None = None,
    nodes: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Examination:
    """Judges facts that were read; a pure function of them.

    Args:
        facts: By topic; :class:`Unread` where they are not known.
        ranks: That would be started on this node; None: see :func:`count_ranks`.
        nodes: Nodes of the run; None: see :func:`count_nodes`.
        environ: Variables.
    """

    def known(topic: str) -> Any:
        found = facts[topic]
        return None if isinstance(found, Unread) else found

    installed, cards, net = known("software"), known("gpus"), known("network")
    torch = installed.torch if installed is not None else None
    seen = torch.device_count if torch is not None and torch.cuda_available else 0
    names = tuple(gpu.name for gpu in cards.gpus) if cards is not None else ()
    on_gpus = bool(seen or names)
    rdma = bool(net is not None and net.rdma)
    nodes = nodes or count_nodes(environ)
    count, source = count_ranks(ranks, seen or len(names), known("cores"), environ)

    def section(topic: str, needs: str, *judges: Callable[[Any], list[Verdict]]) -> Section:
        found = facts[needs]
        if isinstance(found, Unread):
            unread = warning(
                needs, f"Not known: {found.reason}.", "What this machine waits for may hang a run."
            )
            return Section(topic, (unread,))
        return Section(topic, tuple(verdict for each in judges for verdict in each(found)))

    has_nccl = torch is not None and "nccl" in torch.backends and on_gpus
    setting = Setting(
        kernel=platform.release() if platform.system() == "Linux" else None,
        machine=platform.machine(),
        driver=cards.driver if cards is not None else None,
        gpus=names,
        nccl=torch.nccl_loaded if torch is not None else None,
        torch=torch.version if torch is not None else None,
    )
    sections = (
        section("torch and NCCL", "software", software.judge_torch, software.judge_nccl),
        section(
            "GPUs",
            "gpus",
            lambda f: gpus.judge_gpus(f, torch),
            lambda f: gpus.judge_links(f, torch),
        ),
        section("network", "network", lambda f: network.judge_network(f, nodes, nccl=has_nccl)),
        section("names", "names", lambda f: network.judge_names(f, nodes)),
        section("ports", "ports", network.judge_ports),
        section("cores and threads", "cores", lambda f: host.judge_cores(f, count, gpus=on_gpus)),
        section("time", "clock", lambda f: host.judge_clock(f, nodes)),
        section("disk", "disk", host.judge_disk),
        section("limits", "limits", lambda f: host.judge_limits(f, count, rdma=rdma)),
        Section("variables", tuple(judge_variables(environ, gpu=on_gpus, rdma=rdma))),
        Section("known combinations", tuple(judge_combinations(setting))),
    )
    return Examination(socket.gethostname(), count, source, nodes, sections, dict(facts))


def count_ranks(
    asked: int | None, gpu_count: int, cores: Any, environ: Mapping[str, str]
) -> tuple[int, str]:
    """Returns how many ranks are reckoned with on this node, and where that comes from.

    What was asked for, else what the launcher says, else one for each GPU, else two, as
    ``make run`` starts them, or one where there is one core.
    """
    if asked is not None:
        return asked, "--ranks"
    # One task of Slurm on a node is mostly a torchrun, which starts more ranks.
    for name, least in (("LOCAL_WORLD_SIZE", 1), ("SLURM_NTASKS_PER_NODE", 2)):
        text = environ.get(name, "")
        if text.isdecimal() and int(text) >= least:
            return int(text), name
    if gpu_count:
        return gpu_count, "GPUs"
    one = cores is not None and len(cores.allowed) < 2
    return (1, "one core") if one else (2, "no GPU")


def count_nodes(environ: Mapping[str, str]) -> int | None:
    """Returns how many nodes the launcher says that the run has; None where it says nothing."""
    for name in ("SLURM_NNODES", "GROUP_WORLD_SIZE"):
        text = environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return None


def as_json(examination: Examination) -> dict[str, Any]:
    """Returns the examination as what JSON can hold."""
    return {
        "hostname": examination.hostname,
        "ranks": examination.ranks,
        "ranks_from": examination.ranks_from,
        "nodes": examination.nodes,
        "can_run": examination.can_run,
        "counts": {k.replace(" ", "_"): v for k, v in examination.counts.items()},
        "checks": [
            {"topic": section.topic, **dataclasses.asdict(verdict)}
            for section in examination.sections
            for verdict in section.verdicts
        ],
        "facts": {
            topic: {"unread": found.reason}
            if isinstance(found, Unread)
            else dataclasses.asdict(found)
            for topic, found in examination.facts.items()
        },
    }
