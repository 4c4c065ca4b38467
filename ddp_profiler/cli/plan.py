"""``ddp-profiler plan``: batch, epochs, steps and training time of a run, before it is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddp_profiler.cli import ascii_json, write_out
from ddp_profiler.errors import UsageError

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _count(*names: str, help: str, required: bool = False) -> _Decorator:
    return click.option(*names, type=int, required=required, help=help, metavar="N")


def _seconds(name: str, help: str) -> _Decorator:
    return click.option(name, type=float, default=0.0, help=help, metavar="S")


@click.command("plan")
@_count("--samples", required=True, help="Samples of the data set.")
@_count("--epochs", required=True, help="How often they are gone through.")
@_count("--global-batch", help="Samples in an optimizer step: micro-batch x accumulation x dp.")
@_count("--micro-batch", help="Samples of one rank in one micro-step.")
@_count("--accumulate", "accumulation", help="Micro-steps in an optimizer step.")
@_count("--dp", help="Data-parallel replicas.")
@_count("--world-size", help="Devices in all: dp x tp x pp.")
@_count("--tp", help="Devices of a tensor-parallel group.  [default: 1]")
@_count("--pp", help="Stages of a pipeline.  [default: 1]")
@click.option(
    "--drop-last",
    is_flag=False,
    flag_value="both",
    default="none",
    metavar="[sampler|loader|both]",
    help="Who drops what is too little: the sampler (what dp does not divide, which is else filled "
    "up by repeating), the loader (a last, smaller micro-batch), or both, as without a word.",
)
@click.option(
    "--shard",
    default="samples",
    show_default=True,
    metavar="samples|batches",
    help="What is dealt out to ranks: samples, by torch's DistributedSampler, or whole "
    "micro-batches, as by Accelerate.",
)
@click.option(
    "--window",
    default="short",
    show_default=True,
    metavar="short|drop|carry",
    help="Micro-steps at the end of an epoch that fill no step make a shorter one, are dropped, or "
    "count for the next epoch.",
)
@click.option(
    "--step-ms", type=float, metavar="X", help="Time of an optimizer step of this plan, in ms."
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="Run folder that step times come from, and what fits in memory if it was measured with "
    "--find-micro-batch. Also fills in what is left open.",
)
@_seconds("--startup-s", "Time before the first step, in s.")
@_seconds("--evaluation-s", "Time of an evaluation, in s; one an epoch.")
@click.option(
    "--evaluate-every",
    type=int,
    metavar="N",
    help="An evaluation every N optimizer steps, instead of one an epoch.",
)
@_seconds("--checkpoint-s", "Time of a checkpoint, in s; one an epoch.")
@click.option(
    "--checkpoint-every",
    type=int,
    metavar="N",
    help="A checkpoint every N optimizer steps, instead of one an epoch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(step_ms: float | None, run: Path | None, as_json: bool, **options: Any) -> None:
    """Plan a training run: what its batch is, and how many steps and how long it takes.

    global batch = micro-batch x accumulation x dp. Give what you know: what is left open is
    solved, and refused with the nearest settings where no whole numbers do. Shown are
    micro-steps and optimizer steps of an epoch and in all, each rounding by name, samples
    that are repeated or dropped, the training time where a step time is known, and other
    settings of the same global batch, the fastest first, else the largest micro-batch that
    fits in memory first: other splits at this dp, and where dp is left open at other dp too,
    up to 8 times the largest that --run has measured, with predicted times.

    \b
    Examples:
        ddp-profiler plan --samples 50000 --epochs 90 --global-batch 256 --dp 8
        ddp-profiler plan --samples 88492 --epochs 1 --micro-batch 160 --dp 4
        ddp-profiler plan --samples 50000 --epochs 90 --global-batch 256 \\
            --world-size 16 --tp 2 --accumulate 4 --step-ms 120
        ddp-profiler plan --samples 50000 --epochs 90 --global-batch 64 \\
            --run runs/NAME --evaluation-s 30

    Example: 1000 samples with batch 10 take 100 micro-steps and 100 optimizer steps an
    epoch with accumulation 1; with micro-batch 5 and accumulation 2 they take 200
    micro-steps and still 100 optimizer steps.
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what a plan needs.
    import msgspec

    from ddp_profiler.predict.plan import PlanRequest, knowledge_of, make_plan
    from ddp_profiler.report import plan as report
    from ddp_profiler.report.text import for_encoding

    if step_ms is not None and run is not None:
        raise UsageError(
            f"--step-ms {step_ms:g} and --run {run} both tell the step time.", "Give one of them."
        )
    request = PlanRequest(**options)
    known = None
    if run is not None:
        from ddp_profiler.load import load_summary
        from ddp_profiler.predict.predicted_times import predicted

        summary = load_summary(run)
        known = knowledge_of(summary, str(run), more=predicted(summary))
    plan = make_plan(request, known, step_ms)
    # None where stdout is closed, as write_out then says.
    encoding = getattr(sys.stdout, "encoding", None)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()
        write_out(ascii_json(text, encoding) + "\n")
        return
    color = sys.stdout is not None and sys.stdout.isatty()
    write_out(for_encoding(report.render(plan, color=color), encoding))
