"""Traces of all ranks of a made-up job, with the truth: when each rank joined, what moved."""

import random
from dataclasses import dataclass, field

from .kineto import ALL_GATHER, ALL_REDUCE, GEMM, REDUCE_SCATTER, Recording

NAMES = {
    "AllReduce": ALL_REDUCE,
    "AllGather": ALL_GATHER,
    "ReduceScatter": REDUCE_SCATTER,
    "Broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "SendRecv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
STEP_NS = 10_000_000
SPACING_NS = 900_000


@dataclass
class Call:
    """One collective in the script of a step."""

    kind: str = "AllReduce"
    group: str | None = "0"
    members: tuple = ()
    elements: int | None = 1000
    dtype: str = "Float"


@dataclass
class Met:
    """What happened at one collective: begins by rank, end, all on the true clock."""

    kind: str
    group: str | None
    step: int
    begin: dict
    end: int

    @property
    def last(self):
        return max(self.begin, key=self.begin.get)

    @property
    def transfer(self):
        return self.end - self.begin[self.last]

    @property
    def waits(self):
        late = self.begin[self.last]
        return {rank: late - begin for rank, begin in self.begin.items()}


@dataclass
class Job:
    """A job that is made; ``recordings`` by rank, and what is true in ``met``."""

    recordings: dict
    met: list = field(default_factory=list)
    compute: dict = field(default_factory=dict)

    def write(self, folder, *, leave_out=()):
        folder.mkdir(exist_ok=True)
        for rank, made in self.recordings.items():
            if rank not in leave_out:
                made.write(folder / f"rank{rank}.json")
        return folder


def make_job(
    seed=0,
    *,
    world=4,
    steps=3,
    script=None,
    offsets=None,
    drifts=None,
    lag=None,
    end_noise=0,
    annotated=True,
    skip=lambda rank, step, call: False,
    ranks_said=True,
    **settings,
):
    """Makes a job.

    Args:
        seed: Of all that is random.
        world: Number of ranks.
        steps: Steps recorded.
        script: Calls of a step, in order.
        offsets: What each rank's clock shows too much, in ns.
        drifts: How much faster each rank's clock runs, in 10^-6.
        lag: From step, call and rank to how late it joins, in ns; random without.
        end_noise: By how much ends differ at most, in ns.
        annotated: Whether there are ProfilerSteps.
        skip: From rank, step and call to whether the trace lacks it.
        ranks_said: Whether kernels name the ranks of their group.
        settings: Of the recordings.
    """
    draw = random.Random(seed)
    script = script or [Call(elements=size) for size in (1000, 2000, 500)]
    offsets, drifts = offsets or {}, drifts or {}
    job = Job({rank: Recording(rank=rank, world_size=world, **settings) for rank in range(world)})
    job.compute = {rank: [] for rank in range(world)}

    def shown(rank, true_ns):
        return round(true_ns * (1 + drifts.get(rank, 0) / 1e6)) + offsets.get(rank, 0)

    for step in range(steps):
        start = step * STEP_NS + draw.randrange(0, 300_000)
        for rank, made in job.recordings.items():
            begin, end = shown(rank, start), shown(rank, (step + 1) * STEP_NS)
            if annotated:
                made.step(step, begin, end - begin)
        for place, call in enumerate(script):
            at = start + 200_000 + place * SPACING_NS + draw.randrange(0, 20_000)
            members = call.members or tuple(range(world))
            late = {
                rank: lag(step, place, rank) if lag else draw.randrange(0, 300_000)
                for rank in members
            }
            moved = draw.randrange(20_000, 200_000)
            begins = {rank: at + ns for rank, ns in late.items()}
            end = max(begins.values()) + moved
            job.met.append(Met(call.kind, call.group, step, begins, end))
            for rank in members:
                made = job.recordings[rank]
                ended = end + (draw.randrange(-end_noise, end_noise + 1) if end_noise else 0)
                computed = begins[rank] + draw.randrange(-60_000, 60_000)
                length = draw.randrange(1000, 250_000)
                since, until = shown(rank, computed), shown(rank, computed + length)
                made.kernel(since, until - since, GEMM, launched=since - 20_000)
                job.compute[rank].append((step, computed, computed + length))
                if skip(rank, step, place):
                    continue
                arguments = {"Group size": len(members)}
                if call.group is not None:
                    arguments |= {
                        "Process Group Name": call.group,
                        "Process Group Description": f"pg{call.group}",
                    }
                    if ranks_said:
                        arguments["Process Group Ranks"] = str(list(members))
                if call.elements is not None:
                    arguments |= {
                        "In msg nelems": call.elements,
                        "Out msg nelems": call.elements,
                        "dtype": call.dtype,
                    }
                since, until = shown(rank, begins[rank]), shown(rank, ended)
                made.comm(
                    since,
                    until - since,
                    NAMES[call.kind],
                    launched=since - 20_000,
                    stream=20 + (int(call.group or 0) if (call.group or "0").isdigit() else 9),
                    **arguments,
                )
    return job
