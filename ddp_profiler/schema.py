"""The record: what one rank writes while it trains, and what describes the run.

A record holds raw marks (spans on one rank's timeline) and settings. Everything
that can be derived, such as the parts of a step, is derived by
:mod:`ddp_profiler.analysis`, so that a better definition is a re-analysis and
not a new format.

Format history:
    1: first format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

SCHEMA_VERSION = 1


class SpanKind(IntEnum):
    """What a span on a rank's timeline is. Stored as a small integer; never renumber."""

    STEP = 0
    """One optimizer step, from the loop's turn to the next turn."""
    DATA = 1
    """The loop waits for its next micro-batch, host-to-device copy included."""
    FORWARD = 2
    """Forward and loss of one micro-step; a script's ``value`` is the tokens that entered it, and
    ``index`` the places that they took, padding included, where a mask tells them apart."""
    FORWARD_COMM = 3
    """A collective issued inside forward, such as DDP's buffer broadcast."""
    BACKWARD = 4
    """The backward call of one micro-step, until it returns."""
    LOCAL_BACKWARD_END = 5
    """A point: autograd has no local work left (begin equals end)."""
    BACKWARD_COMM = 6
    """A collective issued by a module inside backward, such as synchronised batch norm."""
    GRADIENT = 7
    """A gradient collective: begin is its hand-over, end its completion (null if never noticed)."""
    BOOKKEEPING = 8
    """A collective that DDP needs for itself: unused-parameter map, bucket rebuild."""
    OPTIMIZER = 9
    """optimizer.step and zero_grad."""
    GRADIENT_READY = 10
    """A point: the gradient of parameter ``index`` is ready (no_sync baseline)."""
    ALLREDUCE = 11
    """An AllReduce in isolation: ``bytes`` reduced, ``index`` its ordinal among equal ones."""
    INTERRUPTION = 12
    """Something in a script's step that is no training; ``index`` is an :class:`Interruption`."""
    GRADIENT_DIGEST = 13
    """A point: an optimizer is about to step; ``value`` is a digest of the bits of the gradient
    of parameter ``index``, 0 where it has none."""
    BUFFER_DIGEST = 14
    """A point: an optimizer is about to step; ``value`` is a digest of all buffers' bits."""
    GRAPH_SEARCH = 15
    """Inside forward: DDP looks for parameters that the loss does not depend on."""
    LOCAL_GRADIENT_NORM = 16
    """A point: ``value`` holds the bits of a float64, the squared norm of this rank's gradient as
    it is handed to the reduction, undivided; ``bytes`` is the gradient's size, ``samples`` how
    many are in it, and ``index`` the number of a script's DDP."""
    REDUCED_GRADIENT_NORM = 17
    """The same of the gradient of all ranks, after the reduction."""


class Interruption(IntEnum):
    """Why a step of a script does not count. Stored as a small integer; never renumber."""

    EVALUATION = 0
    """The model was called, or a batch was fetched, without gradients or in evaluation mode."""
    CHECKPOINT = 1
    """Something was saved."""


class Variant(IntEnum):
    """How the steps of a block were measured. Stored as a small integer; never renumber."""

    PLAIN = 0
    """Nothing observed but the step's begin and end."""
    INSTRUMENTED = 1
    """All marks."""
    WARMUP = 2
    """All marks, before steady state; left out by the analysis only."""
    BARE = 3
    """All marks, the model without DDP; at dp = 1 only."""
    NO_SYNC = 4
    """All marks, every micro-step under no_sync and no optimizer step."""
    READY = 5
    """As NO_SYNC, with a mark at each parameter's gradient."""
    ALLREDUCE = 6
    """No steps: AllReduces in isolation, sizes of the sweep."""
    BUCKETS = 7
    """No steps: AllReduces in isolation, the model's buckets one after the other."""
    KINETO = 8
    """All marks, under torch.profiler: the last steps of the block are in its trace. For the
    comparison of both only; left out of all figures."""
    NOISE = 9
    """Every step reduces and the optimizer does not step: norms of gradients before and after
    their reduction, all at the same parameters."""


SPAN_COLUMNS: tuple[tuple[str, str], ...] = (
    ("level", "int16"),
    ("repetition", "int16"),
    ("block", "int32"),
    ("variant", "int8"),
    ("step", "int32"),
    ("micro_step", "int16"),
    ("kind", "int8"),
    ("index", "int32"),
    ("begin_ns", "int64"),
    ("end_ns", "int64"),
    ("bytes", "int64"),
    ("samples", "int32"),
    ("value", "int64"),
)
"""Columns of a rank's Arrow stream, as (name, Arrow type).

``level`` indexes ``run.json``'s levels. ``step`` counts optimizer steps within a
level and repetition; ``micro_step`` counts within the step and is -1 for what
belongs to the step as a whole. ``index`` is the ordinal of a gradient bucket in
its micro-step, or what the kind says, else -1. Times are integer nanoseconds on
the rank's own timeline; ``end_ns`` is null where the end was never noticed.
``bytes`` and ``samples`` are null where they do not apply. ``value`` is what the
kind says: the tokens of a script's ``FORWARD`` and ``STEP``, the number of the DDP
of a script's ``GRADIENT``, the parameters that a ``BOOKKEEPING`` map holds as
unused on this rank, a digest, the bits of a float64 (norms of gradients).
"""

CONDENSED_COLUMNS: tuple[tuple[str, str], ...] = (
    ("collectives", "int32"),
    ("last_begin_ns", "int64"),
    ("busy_ns", "int64"),
    ("overlapped_ns", "int64"),
    ("unnoticed", "int32"),
)
"""What a condensed stream has beside ``SPAN_COLUMNS``: its ``GRADIENT`` rows hold all collectives
of a micro-step and DDP. 0 in all other rows. See :mod:`ddp_profiler.analysis.condensed`.
"""

NULLABLE_SPAN_COLUMNS = frozenset({"end_ns", "bytes", "samples", "value"})


@dataclass(frozen=True)
class LevelSettings:
    """One setting measured in a study.

    Attributes:
        id: Unique name in the run, for example ``dp2-acc4``.
        dp: Number of data-parallel replicas.
        micro_batch: Samples that one rank passes through forward in one micro-step; 0 where a
            script's samples could not be seen.
        accumulation: Micro-steps in an optimizer step.
        placement: ``packed`` (as few nodes as possible) or ``spread`` (as many as possible).
        ranks: Global ranks that take part, in group order.
    """

    id: str
    dp: int
    micro_batch: int
    accumulation: int
    placement: str
    ranks: tuple[int, ...]

    @property
    def global_batch(self) -> int:
        """Configured global batch in samples: micro_batch x accumulation x dp; 0 if not known."""
        return self.micro_batch * self.accumulation * self.dp


@dataclass(frozen=True)
class BatchProof:
    """Gradients of one step of a level, against one process that sees the whole global batch.

    Attributes:
        ranks_agree: Whether reduced gradients were equal, bit for bit, on all ranks; None if
            not checked.
        max_rel_error: Largest over tensors of max|difference| / max|gradient of the one
            process|; None if not computed.
        worst_tensor: The tensor with that error.
        factor: The number by which the level's gradients are too large (least squares over
            all tensors); None if not computed.
        factor_name: What that number is, such as ``dp`` or ``accumulation``; None where it
            is 1 or where no product of the settings matches.
        notes: Why something was not computed or need not hold.
        unexplained: Whether they differ by more than rounding and no factor explains it,
            though they had to be equal.
        must_be_equal: Whether the gradients had to be equal; false where samples influence
            each other or draw their own random numbers, which the notes say.
    """

    ranks_agree: bool | None
    max_rel_error: float | None
    worst_tensor: str | None
    factor: float | None
    factor_name: str | None
    notes: tuple[str, ...] = ()
    unexplained: bool = False
    must_be_equal: bool = True


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter that DDP reduces: its name and its gradient's size in bytes."""

    name: str
    nbytes: int


class ParameterPlace(StrEnum):
    """Where a parameter that an optimizer of a script holds stands to DDP."""

    REDUCED = "reduced"
    """DDP reduces its gradient over all ranks."""
    SUBGROUP = "subgroup"
    """DDP reduces it over some of the ranks."""
    IGNORED = "ignored"
    """It is one of those that DDP was told to ignore."""
    FROZEN = "frozen"
    """It is in a DDP, but needed no gradient when that was built: DDP does not reduce it."""
    OUTSIDE = "outside"
    """It is in no DDP."""


@dataclass(frozen=True)
class OptimizedParameter:
    """A parameter that ``GRADIENT_DIGEST`` points index.

    Attributes:
        name: Its name in its model, or its place in its optimizer.
        place: Where it stands to DDP.
        ddp: The number of the DDP that reduces it; -1 where none does.
    """

    name: str
    place: ParameterPlace
    ddp: int = -1


@dataclass(frozen=True)
class DdpFacts:
    """How a script has built one DistributedDataParallel.

    Attributes:
        find_unused_parameters: As it was set.
        static_graph: As it was set.
        broadcast_buffers: Whether buffers are broadcast before a forward.
        buffer_bytes: Size of the buffers that are broadcast.
        compiled_inside: Whether the module, or a child that holds most of its parameters, had
            been compiled before DDP got it.
        group_size: Ranks of its process group.
        built_by: Top-level package of the code that built it; ``__main__`` is the script.
        number: Its number among all that the script has built, by which spans name it; -1 in
            earlier records, where it is its place among those described.
    """

    find_unused_parameters: bool
    static_graph: bool
    broadcast_buffers: bool
    buffer_bytes: int
    compiled_inside: bool
    group_size: int
    built_by: str
    number: int = -1


@dataclass(frozen=True)
class GpuUse:
    """One rank's NVIDIA GPU, read at the end of each instrumented block while it still works.

    Attributes:
        sm_mhz: Mean clock of its multiprocessors in MHz.
        sm_mhz_max: The most that they can run at.
        clock_reasons: What held the clock down, in words, with the share of readings in
            which it did.
        power_w: Mean power draw in W, as the driver averages it.
        power_limit_w: The limit in force in W.
        temperature_c: Highest reading in degrees Celsius.
        pcie_generation: Highest generation of the link that was read; it drops when idle.
        pcie_generation_max: The most that device and slot can do.
        pcie_width: Most lanes in use that were read.
        pcie_width_max: The most that device and slot can do.
    """

    sm_mhz: float | None = None
    sm_mhz_max: float | None = None
    clock_reasons: dict[str, float] = field(default_factory=dict)
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None


@dataclass(frozen=True)
class MachineUse:
    """What the machine gave one rank during a level's instrumented blocks.

    Sums are over all those blocks, of all repetitions. What could not be read is None.

    Attributes:
        rank: Global rank.
        wall_ms: Time covered.
        user_ms: Processor time of the process outside the kernel, all threads.
        system_ms: Processor time of the process inside the kernel, all threads.
        run_delay_ms: Time for which threads of the process were ready to run and had no
            core, summed over threads.
        preemptions: Times that a thread of the process lost its core before it was done
            (involuntary context switches).
        major_faults: Page faults of the process that had to read from storage.
        steal_fraction: Share of the time of the cores that this rank may use which the
            hypervisor gave to other machines.
        busy_fraction: Share of the time of those cores in which they ran anything at all.
        throttled_ms: Time for which the cgroup's limit on processor time held threads
            back, summed over cores and over all processes of the cgroup.
        throttled_fraction: Share of the limit's periods in which it was reached.
        cpu_mhz: Mean clock of the cores that this rank may use, at the end of blocks.
        cores: Number of cores that this rank may use.
        affinity: Those cores, such as ``0-3,8``.
        threads: Threads that torch computes an operation with.
        gpu: Its NVIDIA GPU; None without one, or without nvidia-ml-py.
    """

    rank: int
    wall_ms: float
    user_ms: float | None = None
    system_ms: float | None = None
    run_delay_ms: float | None = None
    preemptions: int | None = None
    major_faults: int | None = None
    steal_fraction: float | None = None
    busy_fraction: float | None = None
    throttled_ms: float | None = None
    throttled_fraction: float | None = None
    cpu_mhz: float | None = None
    cores: int | None = None
    affinity: str | None = None
    threads: int | None = None
    gpu: GpuUse | None = None


@dataclass(frozen=True)
class LinkStreams:
    """Streams between two neighbouring ranks of a level's ring, while nothing else ran.

    Attributes:
        sender: Global rank.
        receiver: Global rank.
        nbytes: Bytes of each stream that were timed; what was sent before them is not.
        elapsed_ns: Time of each stream at the receiver, in ns.
    """

    sender: int
    receiver: int
    nbytes: int
    elapsed_ns: tuple[int, ...]


@dataclass(frozen=True)
class LoaderFacts:
    """A DataLoader of a script from which training micro-batches came on one rank.

    What a loader of unknown make does not tell is None; nothing is asked that could have an
    effect on training.

    Attributes:
        sampling: How samples are chosen: ``distributed`` (a DistributedSampler), ``sharded``
            (batches dealt out to ranks, as by Accelerate), ``sequential`` or ``random`` (the
            whole data set), ``iterable`` (the data set itself chooses) or ``other``.
        sampler: Class of what chooses samples or batches.
        dataset: Class of the data set.
        dataset_size: Samples that the sampler chooses from.
        dataset_digest: Of what the data set holds: equal on ranks whose data sets are alike;
            None where it holds something of unknown make.
        num_replicas: Ranks among which the sampler shares the samples.
        replica: The share of this rank, from 0.
        sampler_drop_last: Whether the sampler cuts what cannot be shared; else it pads.
        samples: Samples that the sampler gives this rank in an epoch.
        batch_size: Samples of a micro-batch.
        drop_last: Whether the loader drops a last, smaller micro-batch.
        batches: Micro-batches of an epoch on this rank.
        workers: Worker processes.
        persistent_workers: Whether they outlive an epoch.
        pin_memory: Whether batches are copied to pinned memory.
        holds_more: Whether the data set holds something longer than itself: its
            ``__getitem__`` may take this rank's share.
    """

    sampling: str
    sampler: str | None = None
    dataset: str | None = None
    dataset_size: int | None = None
    dataset_digest: int | None = None
    num_replicas: int | None = None
    replica: int | None = None
    sampler_drop_last: bool | None = None
    samples: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    batches: int | None = None
    workers: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    holds_more: bool = False


@dataclass(frozen=True)
class RankFeed:
    """What fed a script's training on one rank.

    Attributes:
        rank: Global rank.
        loaders: The DataLoaders, in the order in which they first gave a training micro-batch.
        digests: Of the first micro-batches that came from them and entered forward as they
            were; equal on two ranks that trained on the same samples.
        joins: Whether training ran under DDP's join, which lets ranks end early.
    """

    rank: int
    loaders: tuple[LoaderFacts, ...] = ()
    digests: tuple[int, ...] = ()
    joins: bool = False


@dataclass(frozen=True)
class OperationGroup:
    """Operations of one kind and of about the same size; sizes are doubled from group to group.

    Attributes:
        operations: How many.
        nbytes: Bytes of all tensors that they read and write, summed over operations.
        flops: Floating-point operations of matrix products and convolutions; 0 for others.
    """

    operations: int
    nbytes: int
    flops: int


@dataclass(frozen=True)
class OperationCount:
    """The operations of a level's training, counted apart from its steps on its first rank.

    Attributes:
        micro_batch: Samples of the micro-step that was counted.
        micro_step: Forward, loss and backward.
        optimizer: An optimizer's step; None if it could not be counted.
    """

    micro_batch: int
    micro_step: tuple[OperationGroup, ...]
    optimizer: tuple[OperationGroup, ...] | None = None


@dataclass(frozen=True)
class CopyRate:
    """How fast a device copies within its memory.

    Attributes:
        nbytes: Bytes of source and destination together.
        bytes_per_s: Bytes read and written in a second.
    """

    nbytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class DevicePeaks:
    """What a rank's device is, and what it reaches at its best, measured by this run.

    Attributes:
        rank: Global rank of the process that measured, while the level's others waited.
        name: As ``torch.cuda.get_device_name`` has it; of a CPU its model.
        device_type: ``cpu`` or ``cuda``.
        arithmetic: What its matrix products compute in: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        memory_bytes: Size of a GPU's memory.
        multiprocessors: Multiprocessors (NVIDIA) or compute units (AMD) of a GPU.
        flops_per_s: Rate of a large matrix product; None if not measured.
        copies: Copies of rising size, of which the last does not fit in any cache.
        operation_s: Time that the smallest operation takes, in s, one after the other.
    """

    rank: int
    name: str
    device_type: str
    arithmetic: str
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    flops_per_s: float | None = None
    copies: tuple[CopyRate, ...] = ()
    operation_s: float | None = None


@dataclass(frozen=True)
class LevelFacts:
    """What the worker found out about a level while it ran it (rank 0 of the level writes it).

    Attributes:
        id: The level's id.
        parameters: Trainable parameters that DDP reduces, each counted once.
        gradient_bytes: Their gradients' size in bytes.
        num_buckets: DDP's buckets in steady state (after its rebuild); null without DDP.
        bucket_bytes: Size of each bucket in bytes, in the order of reduction; null if unknown.
        sources: Which mechanism gave each figure, by figure; null where none could.
        notes: Anything that a reader of the numbers has to know.
        reduced: The parameters that DDP reduces; ``GRADIENT_READY`` spans index it.
        flops_per_sample: Floating-point operations of forward and backward for one sample,
            as torch counts them (matrix products and convolutions); None if not counted.
        peak_flops_per_s: Rate of a large matrix product on this device in the run's
            precision with the run's threads; None if not measured.
        proof: The batch proof; None if not run.
        device_clock_uncertainty_ns: By how much times of device events may be off the host's
            clock, the largest over ranks; 0 where marks are made on the host.
        machine: What the machine gave each rank of the level; empty if not recorded.
        link: Streams over a link of the level's ring, between nodes where it has several;
            None at dp = 1.
        loss_divisor: What a script divides its loss by just before backward, in most
            micro-steps of the warm-up on rank 0; None where autograd shows no such number.
        feeds: What fed training on each rank of a script; empty if not recorded.
        built_by: Top-level package of the code that built a script's first DDP, which may be
            a framework's; ``__main__`` is the script. Empty in a study.
        ddps: How a script has built its DDPs, in order; empty in a study.
        optimized: The parameters that ``GRADIENT_DIGEST`` points index.
        reduced_outside_bytes: Bytes that rank 0 of a script handed to ``all_reduce`` by itself
            outside forward and backward, while it was observed.
        operations: The operations of a micro-step and of the optimizer; None if not counted.
        device: The device of the level's first rank, with its peaks; None if not measured.
        start_up_ms: From the start of the level to its first warm-up step on its first rank:
            model, data and DDP are made; of its first visit. None if not measured.
    """

    id: str
    parameters: int
    gradient_bytes: int
    num_buckets: int | None
    bucket_bytes: tuple[int, ...] | None
    sources: dict[str, str | None]
    notes: tuple[str, ...] = ()
    reduced: tuple[ParameterFacts, ...] = ()
    flops_per_sample: int | None = None
    peak_flops_per_s: float | None = None
    proof: BatchProof | None = None
    device_clock_uncertainty_ns: int = 0
    machine: tuple[MachineUse, ...] = ()
    link: LinkStreams | None = None
    loss_divisor: float | None = None
    feeds: tuple[RankFeed, ...] = ()
    built_by: str = ""
    ddps: tuple[DdpFacts, ...] = ()
    optimized: tuple[OptimizedParameter, ...] = ()
    reduced_outside_bytes: int = 0
    operations: OperationCount | None = None
    device: DevicePeaks | None = None
    start_up_ms: float | None = None


@dataclass(frozen=True)
class RankPlace:
    """Where a rank ran.

    Attributes:
        rank: Global rank.
        local_rank: Rank within its node.
        node: Index of its node, in order of first rank.
        hostname: The node's name.
        clock_domain: Ranks with equal values read the same monotonic clock.
        device: ``cpu`` or for example ``cuda:0``.
        pid: Process id on its node.
    """

    rank: int
    local_rank: int
    node: int
    hostname: str
    clock_domain: str
    device: str
    pid: int


@dataclass(frozen=True)
class ClockReading:
    """A comparison of a host's monotonic clock with that of rank 0.

    Attributes:
        rank: The first rank that reads the compared clock; it stands for its clock domain.
        at_ns: When, on that clock.
        low_ns: Its offset, own clock - rank 0's clock, is at least this.
        high_ns: And at most this.
        real_offset_ns: Real time (since 1970) there less that of rank 0's host.
    """

    rank: int
    at_ns: int
    low_ns: int
    high_ns: int
    real_offset_ns: int


@dataclass(frozen=True)
class Failure:
    """Something that went wrong in a run.

    Attributes:
        rank: Global rank that noted it.
        phase: What the rank was doing.
        message: What went wrong.
        hostname: The rank's node; empty where ranks had not met.
    """

    rank: int
    phase: str
    message: str
    hostname: str = ""


@dataclass(frozen=True)
class RankPhase:
    """What a rank was doing when a run failed.

    Attributes:
        rank: Global rank.
        hostname: Its node.
        phase: The last phase that it made known.
        responds: Whether it gave a sign of life after the failure; None if not known.
    """

    rank: int
    hostname: str
    phase: str
    responds: bool | None


@dataclass(frozen=True)
class RecordPart:
    """A folder with the files of some ranks, where not all ranks see one folder.

    Attributes:
        keeper: The rank that claimed the folder.
        hostname: Name of its node.
        folder: Absolute path of the folder on that node.
        ranks: The ranks that wrote their files there, in order.
    """

    keeper: int
    hostname: str
    folder: str
    ranks: tuple[int, ...]


class TrialOutcome(StrEnum):
    """What became of a micro-batch that was tried."""

    FITS = "fits"
    """Forward, backward and optimizer ran on every rank, below the limit."""
    OUT_OF_MEMORY = "out_of_memory"
    """A rank could not allocate what it needed."""
    OVER_LIMIT = "over_limit"
    """It ran, and took more than the limit."""
    NOT_TRIED = "not_tried"
    """What the sizes before it let expect is above the limit."""


@dataclass(frozen=True)
class MicroBatchTrial:
    """One micro-batch that was tried, or that memory left no room to try.

    Attributes:
        micro_batch: Samples.
        outcome: What became of it.
        peak_bytes: Most memory that a rank had in use; None where that could not be read.
        expected_bytes: What the sizes before it let expect; None below two.
        micro_step_ns: Each timed micro-step on the rank that took longest for it; empty where
            it does not fit.
    """

    micro_batch: int
    outcome: TrialOutcome
    peak_bytes: int | None
    expected_bytes: int | None = None
    micro_step_ns: tuple[int, ...] = ()


@dataclass(frozen=True)
class MicroBatchSearch:
    """Memory and time of micro-steps against the micro-batch, all ranks of a level at once.

    Attributes:
        dp: Ranks that took part.
        ended: Why no larger one was tried: ``memory``, ``slower`` (per sample) or ``time``.
        limit_bytes: Memory that a rank may use, the least over ranks; None if not known.
        limit_source: Where the limit comes from.
        memory_source: What ``peak_bytes`` are.
        trials: In the order in which they were made.
    """

    dp: int
    ended: str
    limit_bytes: int | None
    limit_source: str
    memory_source: str
    trials: tuple[MicroBatchTrial, ...]


@dataclass(frozen=True)
class Change:
    """A change of settings at a level; what is None or false stays as it was.

    Attributes:
        bucket_cap_mb: Size limit of DDP's buckets in MB of 2**20 bytes.
        accumulation: Micro-steps in a step.
        reduce_once: Reduce in the last micro-step only.
        bucket_view: Keep gradients in the buckets (gradient_as_bucket_view).
    """

    bucket_cap_mb: float | None = None
    accumulation: int | None = None
    reduce_once: bool = False
    bucket_view: bool = False


@dataclass(frozen=True)
class Confirmation:
    """A proposed change, and what was measured with and without it in turns.

    Attributes:
        level: The id of the level.
        change: What was changed.
        setting: Name of what was changed.
        text: The change in words.
        predicted_gain_ms: Predicted for as many samples as a step of the level has.
        predicted_interval90_ms: 90 % of what was thought possible.
        before_ms: Mean step of each block without the change.
        after_ms: Mean time for as many samples in each block with it.
        steps: Steps of a block.
        problem: Why it could not be measured; empty if it was.
    """

    level: str
    change: Change
    setting: str = ""
    text: str = ""
    predicted_gain_ms: float = 0.0
    predicted_interval90_ms: tuple[float, float] = (0.0, 0.0)
    before_ms: tuple[float, ...] = ()
    after_ms: tuple[float, ...] = ()
    steps: int = 0
    problem: str = ""


@dataclass(frozen=True)
class RunInfo:
    """The content of ``run.json``.

    Attributes:
        schema_version: See the module's format history.
        run_id: Unique name of the launch.
        status: ``running``, ``complete`` or ``failed``.
        created: Start of the run, ISO 8601 with zone.
        profiler_version: Version of this package.
        world_size: Number of ranks of the launch.
        settings: The settings in force, by name.
        levels: The levels that the run measures, in order.
        ranks: Where each rank ran.
        environment: Software and hardware of each node, by node index as text.
        facts: What the workers found out, one entry for each finished level.
        failures: What went wrong, the first one first.
        clocks: Comparisons of the hosts' clocks, in order of time; none on one clock.
        keeper: The rank that claimed this folder: 0, but for a folder that a node without the
            run's own folder keeps.
        parts: The folders that ranks wrote to, that of rank 0 first; empty where it was one.
        phases: What each rank was doing when the run failed; empty where it did not, or where
            ranks could not be asked.
        confirmation: The change that was measured, with ``--confirm``; None without.
        micro_batches: What ``--find-micro-batch`` measured; None without it.
    """

    schema_version: int
    run_id: str
    status: str
    created: str
    profiler_version: str
    world_size: int
    settings: dict[str, Any]
    levels: tuple[LevelSettings, ...]
    ranks: tuple[RankPlace, ...] = ()
    environment: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: tuple[LevelFacts, ...] = ()
    failures: tuple[Failure, ...] = ()
    clocks: tuple[ClockReading, ...] = ()
    keeper: int = 0
    parts: tuple[RecordPart, ...] = ()
    phases: tuple[RankPhase, ...] = ()
    confirmation: Confirmation | None = None
    micro_batches: MicroBatchSearch | None = None
