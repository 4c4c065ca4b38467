"""What a study is asked to do: frozen settings, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ddp_profiler.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")
SCALINGS = ("weak", "strong")
BACKENDS = ("auto", "nccl", "gloo")
PLACEMENTS = ("packed", "spread", "both")
COLLECTIONS = ("auto", "whole", "condensed")
DEFAULT_MODEL = "gpt-tiny"
DEFAULT_MICRO_BATCH = 8
MIN_WARMUP = 2
MIN_WARMUP_OF_REPLAY = 3
"""The last step of the warm-up absorbs what keeping the one before it costs."""
MAX_ACCUMULATION = 10_000
"""The record numbers micro-steps in 14 bits."""
MAX_ALLREDUCE_MB = 64.0
_LONGEST_TIMEOUT_S = 30 * 86400.0


@dataclass(frozen=True)
class StudyConfig:
    """Settings of a scaling study.

    Attributes:
        model: Name of a built-in model, or ``package.module:factory``, with options.
        data: Text file to train a language model on; synthetic data where None.
        dp: Data-parallel sizes to measure; 1, 2, 4, ... and the world size where None.
        accumulate: Micro-steps in an optimizer step; several values are several levels.
            With a global batch and where None, they follow from the identity; else 1.
        micro_batch: Samples that one rank passes through forward in one micro-step. With a
            global batch and accumulate, and where None, it follows from the identity; else 8.
        scaling: ``weak`` keeps micro-batch and accumulation at every dp, ``strong`` keeps
            the global batch; strong with a global batch, else weak, where None.
        global_batch: Samples in an optimizer step over all ranks, for strong scaling.
        expect_global_batch: The global batch that the user believes to have; checked.
        repeat: How often each level is measured afresh, in shuffled order.
        steps: Optimizer steps to measure per level in each variant (plain, instrumented).
        warmup: Optimizer steps before that, recorded and left out by the analysis.
        precision: fp32, or autocast to bf16 or fp16 with fp32 parameters and gradients.
        bucket_cap_mb: Size limit of DDP's gradient buckets, in MB of 2**20 bytes.
        allreduce_max_mb: Largest AllReduce in isolation, in MB of 2**20 bytes; 0 leaves the
            sweep out.
        backend: nccl, gloo, or auto (nccl with a GPU for each rank, else gloo).
        placement: On several nodes, levels below the world size on as few nodes as possible
            (packed), on as many as possible (spread), or one of each (both).
        link_gbps: Rate of the links between nodes in Gbit/s, from their data sheet; measured
            where None.
        threads_per_rank: Threads of each rank; cores shared out evenly where None.
        timeout_s: Seconds after which a rank gives up waiting for others.
        out: Run folder; a fresh one below runs/ where None.
        seed: Seed of parameters and data order.
        plants: Delays planted on purpose, for tests.
        debug: Show stack traces of errors.
        kineto: Optimizer steps of each level to run under torch.profiler, once all levels are
            measured; 0 for none.
        confirm: Measure the change of settings that is predicted to gain most.
        find_micro_batch: Measure memory and speed against the micro-batch first. The levels then
            use the one that is found where neither micro_batch nor global_batch is given.
        collect: What comes to rank 0 of the files on nodes that do not see its folder: ``whole``,
            ``condensed``, or ``auto``, which is condensed where they are large.
        memory_limit_gb: Memory in GB that a rank may use in that search; what the machine has to
            spare where None.
        nccl: Another ``libnccl.so.2`` to use than torch's own.

    Raises:
        UsageError: A setting is out of its range.
    """

    model: str = DEFAULT_MODEL
    data: Path | None = None
    dp: tuple[int, ...] | None = None
    accumulate: tuple[int, ...] | None = None
    micro_batch: int | None = None
    scaling: str | None = None
    global_batch: int | None = None
    expect_global_batch: int | None = None
    repeat: int = 1
    steps: int = 20
    warmup: int = 5
    precision: str = "fp32"
    bucket_cap_mb: float = 25.0
    allreduce_max_mb: float = MAX_ALLREDUCE_MB
    backend: str = "auto"
    threads_per_rank: int | None = None
    timeout_s: float = 300.0
    out: Path | None = None
    seed: int = 0
    plants: tuple[str, ...] = ()
    debug: bool = False
    link_gbps: float | None = None
    placement: str = "both"
    kineto: int = 0
    confirm: bool = False
    find_micro_batch: bool = False
    memory_limit_gb: float | None = None
    collect: str = "auto"
    nccl: Path | None = None

    def __post_init__(self) -> None:
        _at_least("--steps", self.steps, 1)
        _at_least("--kineto", self.kineto, 0)
        if self.warmup < MIN_WARMUP:
            raise UsageError(
                f"--warmup {self.warmup} is below {MIN_WARMUP}: DDP rebuilds its buckets at the "
                "second step.",
                f"Give --warmup {MIN_WARMUP} or more.",
            )
        _at_least("--repeat", self.repeat, 1)
        for option, value in (
            ("--micro-batch", self.micro_batch),
            ("--global-batch", self.global_batch),
            ("--expect-global-batch", self.expect_global_batch),
        ):
            if value is not None:
                _at_least(option, value, 1)
        if self.scaling is not None:
            _one_of("--scaling", self.scaling, SCALINGS)
        if self.threads_per_rank is not None:
            _at_least("--threads-per-rank", self.threads_per_rank, 1)
        if self.accumulate is not None:
            _unique_positive("--accumulate", self.accumulate)
            if max(self.accumulate) > MAX_ACCUMULATION:
                raise UsageError(
                    f"--accumulate {max(self.accumulate)} is above {MAX_ACCUMULATION}.",
                    "Raise --micro-batch instead.",
                )
        if self.dp is not None:
            _unique_positive("--dp", self.dp)
        if not 0 < self.bucket_cap_mb < math.inf:
            raise UsageError(
                f"--bucket-cap-mb {self.bucket_cap_mb:g} is no size above 0.",
                "DDP's default is 25.",
            )
        if not 0 <= self.allreduce_max_mb < math.inf:
            raise UsageError(
                f"--allreduce-max-mb {self.allreduce_max_mb:g} is no size of 0 or more.",
                "0 leaves the sweep out.",
            )
        if self.allreduce_max_mb > MAX_ALLREDUCE_MB:
            raise UsageError(
                f"--allreduce-max-mb {self.allreduce_max_mb:g} is above {MAX_ALLREDUCE_MB:g}, the "
                "largest size that is measured.",
                f"Give --allreduce-max-mb {MAX_ALLREDUCE_MB:g} or less.",
            )
        if self.link_gbps is not None and not 0 < self.link_gbps < math.inf:
            raise UsageError(
                f"--link-gbps {self.link_gbps:g} is no rate above 0.",
                "It is a rate in Gbit/s; without it the link is measured.",
            )
        if not 0 < self.timeout_s <= _LONGEST_TIMEOUT_S:
            raise UsageError(
                f"--timeout {self.timeout_s:g} is no time between 0 and {_LONGEST_TIMEOUT_S:g} s.",
                "It is a time in seconds.",
            )
        if self.memory_limit_gb is not None:
            if not self.find_micro_batch:
                raise UsageError(
                    "--memory-limit-gb limits the search for a micro-batch, which is not asked "
                    "for.",
                    "Add --find-micro-batch, or leave it out.",
                )
            if not 0 < self.memory_limit_gb < math.inf:
                raise UsageError(
                    f"--memory-limit-gb {self.memory_limit_gb:g} is no size above 0.",
                    "It is the memory of one rank, in GB.",
                )
        _one_of("--precision", self.precision, PRECISIONS)
        _one_of("--backend", self.backend, BACKENDS)
        if self.nccl is not None and self.backend == "gloo":
            raise UsageError(
                "--nccl names an NCCL, and --backend gloo uses none.", "Leave one of them out."
            )
        _one_of("--placement", self.placement, PLACEMENTS)
        _one_of("--collect", self.collect, COLLECTIONS)


@dataclass(frozen=True)
class ScriptConfig:
    """Settings for observing a training script.

    Attributes:
        script: Path of the script, or name of the module; None where a program observes itself
            by a line of its own.
        arguments: The script's own arguments.
        module: Whether ``script`` names a module, as in ``python -m``.
        steps: Optimizer steps to observe in each variant (plain, instrumented).
        warmup: Optimizer steps before that, recorded and left out by the analysis.
        batch_dim: Dimension of forward's first tensor that counts samples.
        expect_global_batch: The global batch that the user believes to have; checked.
        timeout_s: Seconds after which waiting for other ranks at the start is given up.
        out: Run folder; a fresh one below runs/ where None.
        debug: Show stack traces of our own errors.
        replay: ``package.module:function`` that computes the loss of the whole global batch;
            the last step but one of the warm-up is compared with it.
        every: Optimizer steps from the begin of one window of observed steps to the next; only
            one window where None.
        nccl: Another ``libnccl.so.2`` to use than torch's own.

    Raises:
        UsageError: A setting is out of its range.
    """

    script: str | None
    arguments: tuple[str, ...] = ()
    module: bool = False
    steps: int = 20
    warmup: int = 5
    batch_dim: int = 0
    expect_global_batch: int | None = None
    timeout_s: float = 300.0
    out: Path | None = None
    debug: bool = False
    replay: str | None = None
    every: int | None = None
    nccl: Path | None = None

    @property
    def window(self) -> int:
        """Optimizer steps of a window: plain and instrumented ones."""
        return 2 * self.steps

    def __post_init__(self) -> None:
        _at_least("--steps", self.steps, 1)
        _at_least("--warmup", self.warmup, MIN_WARMUP)
        if self.replay is not None:
            module, _, function = self.replay.partition(":")
            if not all(part.isidentifier() for part in f"{module}.{function}".split(".")):
                raise UsageError(
                    f"--replay {self.replay} is not of the form package.module:function.",
                    "Name the module as in import; see docs/scripts.md.",
                )
            if self.warmup < MIN_WARMUP_OF_REPLAY:
                raise UsageError(
                    f"--warmup {self.warmup} is too few for --replay, which compares the last "
                    "step but one of the warm-up, after DDP has rebuilt its buckets.",
                    f"Give --warmup {MIN_WARMUP_OF_REPLAY} or more.",
                )
        if self.every is not None and self.every <= self.window:
            raise UsageError(
                f"--every {self.every} is not above {self.window}, the length of a window: "
                f"{self.steps} plain and {self.steps} instrumented steps.",
                f"Give --every {self.window + 1} or more, or fewer --steps.",
            )
        _at_least("--batch-dim", self.batch_dim, 0)
        if self.expect_global_batch is not None:
            _at_least("--expect-global-batch", self.expect_global_batch, 1)
        if not 0 < self.timeout_s <= _LONGEST_TIMEOUT_S:
            raise UsageError(
                f"--timeout {self.timeout_s:g} is no time between 0 and {_LONGEST_TIMEOUT_S:g} s.",
                "It is a time in seconds.",
            )
        if self.script is not None and not self.module and not Path(self.script).is_file():
            raise UsageError(
                f"There is no script {self.script}.",
                "Name a file, or a module with --module NAME; options of ours come before it.",
            )


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Reads a comma-separated list of whole numbers, such as ``1,2,4``.

    Raises:
        UsageError: Something in the list is not a whole number.
    """
    numbers = []
    for part in text.split(","):
        try:
            numbers.append(int(part.strip()))
        except ValueError:
            raise UsageError(
                f"{option} {text}: {part.strip()!r} is not a whole number.",
                f"Give whole numbers separated by commas, such as {option} 1,2,4.",
            ) from None
    return tuple(numbers)


def _at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{option} {value} is below {least}.", f"Give {option} {least} or more.")


def _unique_positive(option: str, values: tuple[int, ...]) -> None:
    text = ",".join(map(str, values))
    if not values or min(values) < 1:
        raise UsageError(f"{option} {text}: every value must be 1 or more.", "Correct the list.")
    if len(set(values)) != len(values):
        raise UsageError(f"{option} {text} names a value twice.", "Name each value once.")


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{option} {value} is unknown.", f"Choose one of: {', '.join(known)}.")
