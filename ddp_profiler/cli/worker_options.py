"""The options of the worker, ``torchrun ... -m ddp_profiler.run``, as one checked setting."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click

from ddp_profiler.config import (
    BACKENDS,
    COLLECTIONS,
    DEFAULT_MICRO_BATCH,
    DEFAULT_MODEL,
    PLACEMENTS,
    PRECISIONS,
    SCALINGS,
    ScriptConfig,
    StudyConfig,
    parse_numbers,
)
from ddp_profiler.workload.catalog import BUILTIN_MODELS


def _model_line(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name:<10} {text}", 78, initial_indent="    ", subsequent_indent=" " * 15
    )


_MODELS = "\n".join(_model_line(name, text) for name, text in BUILTIN_MODELS.items())
_HELP = f"""Time every part of a data-parallel training step.

Without SCRIPT: trains a model at dp = 1, 2, 4, ... up to the number of ranks, in this
one launch, and shows how long data, forward, backward, exposed and hidden
communication and the optimizer take at each. Works without any option.

With SCRIPT: runs your own training script, unchanged, with ARGS, and shows the same
of some of its steps (--warmup, --steps). Its output, exit code and results stay what
they are; ours goes to stderr. Options of ours come before SCRIPT.

\b
Examples:
    torchrun --nproc_per_node=8 -m ddp_profiler.run
    torchrun --nproc_per_node=8 -m ddp_profiler.run train.py --lr 3e-4
    torchrun --nproc_per_node=8 -m ddp_profiler.run --module package.train --lr 3e-4
    torchrun --nproc_per_node=8 -m ddp_profiler.run --every 1000 train.py
    torchrun --nproc_per_node=8 -m ddp_profiler.run --data FILE --accumulate 1,4
    torchrun --nproc_per_node=2 -m ddp_profiler.run --model mlp:width=2048 --dp 2

\b
Models (options after a colon, as in mlp:width=2048,depth=8):
{_MODELS}
    package.module:factory   a model of your own, see docs/custom-models.md

Exit codes: 0 done; 1 a check that you asked for does not hold; 2 wrong usage or
settings; 3 unusable input; with SCRIPT, the script's own. torchrun itself ends with 1
when a rank fails.
"""

_FOR_SCRIPTS = frozenset(
    {
        "steps",
        "warmup",
        "every",
        "expect_global_batch",
        "timeout_s",
        "out",
        "debug",
        "batch_dim",
        "module",
        "replay",
        "nccl",
    }
)
_OF_SCRIPTS_ONLY = frozenset({"module", "batch_dim", "every", "replay"})


def _numbers(
    _: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    if text is None or (text == "all" and parameter.name == "dp"):
        return None
    return parse_numbers(parameter.opts[0], text)


_defaults = StudyConfig()


@click.command(
    help=_HELP,
    # What follows SCRIPT belongs to the script.
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
)
@click.argument("words", metavar="[SCRIPT [ARGS]...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.option(
    "--batch-dim",
    type=int,
    default=0,
    show_default=True,
    help="With SCRIPT: the dimension of the model's first input that counts samples.",
)
@click.option(
    "--replay",
    metavar="package.module:function",
    help="With SCRIPT: your function from the bare model and the micro-batches of one step to the "
    "loss of the whole global batch; the gradients that DDP reduced are compared with it, see "
    "docs/scripts.md.",
)
@click.option(
    "--every",
    type=int,
    metavar="K",
    help="With SCRIPT: observe a window of --steps plain and as many instrumented steps every K "
    "optimizer steps until training ends. Default: one window.",
)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Model, with its options.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Any text file: trains a byte-level language model on it. Default: synthetic data.",
)
@click.option(
    "--dp",
    default="all",
    callback=_numbers,
    show_default=True,
    help="Data-parallel sizes to measure, such as 1,2,8; all: powers of two and the world size.",
)
@click.option(
    "--placement",
    default=_defaults.placement,
    show_default=True,
    metavar="|".join(PLACEMENTS),
    help="On several nodes, ranks of a dp below the world size: packed on as few nodes as "
    "possible, spread over as many as possible, or a level of each, which tells what crossing "
    "nodes costs.",
)
@click.option(
    "--accumulate",
    callback=_numbers,
    help="Micro-steps in an optimizer step; several values, as in 1,4, are several levels. "
    "Default: 1, or what --global-batch and --micro-batch ask for.",
)
@click.option(
    "--micro-batch",
    type=int,
    help=f"Samples of one rank in one micro-step. Default: {DEFAULT_MICRO_BATCH}, or what "
    "--global-batch and --accumulate ask for.",
)
@click.option(
    "--find-micro-batch",
    is_flag=True,
    help="First double the micro-batch at the largest dp until memory is used up or samples get "
    "slower, and show memory and speed of each. The levels then use the smallest within 5 % of the "
    "best speed, unless --micro-batch or --global-batch is given.",
)
@click.option(
    "--memory-limit-gb",
    type=float,
    help="Memory of a rank that --find-micro-batch may use. Default: 70 % of what the host has "
    "available, shared by its ranks; all of a GPU.",
)
@click.option(
    "--scaling",
    metavar="|".join(SCALINGS),
    help="weak: micro-batch and accumulation stay; strong: the global batch stays. "
    "Default: strong with --global-batch, else weak.",
)
@click.option(
    "--global-batch",
    type=int,
    help="Samples in an optimizer step over all ranks: micro-batch x accumulation x dp.",
)
@click.option(
    "--expect-global-batch",
    type=int,
    help="The global batch that you believe to have: exit code 1 if another is observed at "
    "the largest dp (strong scaling: at any).",
)
@click.option(
    "--repeat",
    type=int,
    default=1,
    show_default=True,
    help="Measure each level afresh this often, in shuffled order; intervals then come from "
    "these repetitions.",
)
@click.option(
    "--steps",
    type=int,
    default=_defaults.steps,
    show_default=True,
    help="Optimizer steps to measure at each level, plain and instrumented each.",
)
@click.option(
    "--warmup",
    type=int,
    default=_defaults.warmup,
    show_default=True,
    help="Optimizer steps before that; recorded, left out of the figures.",
)
@click.option(
    "--precision",
    default=_defaults.precision,
    show_default=True,
    metavar="|".join(PRECISIONS),
    help="bf16 and fp16 mean autocast; parameters and gradients stay fp32.",
)
@click.option(
    "--bucket-cap-mb",
    type=float,
    default=_defaults.bucket_cap_mb,
    show_default=True,
    help="Size limit of DDP's gradient buckets, in MB of 2^20 bytes.",
)
@click.option(
    "--allreduce-max-mb",
    type=float,
    default=_defaults.allreduce_max_mb,
    show_default=True,
    help="Largest message of the AllReduce sweep in isolation, 64 at most; 0 leaves the sweep out.",
)
@click.option(
    "--link-gbps",
    type=float,
    help="Rate of the links between nodes in Gbit/s, from their data sheet, for the ring bound. "
    "Default: measured.",
)
@click.option(
    "--kineto",
    type=int,
    metavar="N",
    default=_defaults.kineto,
    show_default=True,
    help="Once all levels are measured, run N more optimizer steps of each under torch.profiler "
    "and keep its traces in the run folder, for ddp-profiler trace RUN; 0: none.",
)
@click.option(
    "--confirm",
    is_flag=True,
    help="Then measure the change of settings that is predicted to gain most of those that leave "
    "training as it is, in turns with the setting as it is, and show predicted against real gain.",
)
@click.option(
    "--backend",
    default=_defaults.backend,
    show_default=True,
    metavar="|".join(BACKENDS),
    help="auto: nccl where each rank has a GPU of its own, else gloo.",
)
@click.option(
    "--nccl",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Use this libnccl.so.2 instead of torch's own, for example to compare two versions; see "
    "docs/gpu.md.",
)
@click.option(
    "--threads-per-rank",
    type=int,
    help="Threads of each rank at every dp. Default: the node's cores shared out evenly.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=_defaults.timeout_s,
    show_default=True,
    help="Seconds after which waiting for another rank is given up.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Run folder to create. Default: a fresh one below runs/.",
)
@click.option(
    "--collect",
    default=_defaults.collect,
    show_default=True,
    metavar="|".join(COLLECTIONS),
    help="What comes to rank 0 from nodes that do not see its folder: their ranks' files whole, or "
    "condensed to about a twentieth, of which the same figures are made; auto: condensed from "
    "64 MiB on. The whole files stay on their nodes.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of parameters and data.")
@click.option(
    "--plant",
    "plants",
    multiple=True,
    metavar="SPEC",
    help="FOR TESTS ONLY: plant a fault, such as a delay: part=backward,ms=30,rank=1; "
    "docs/lab.md lists them.",
)
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
@click.pass_context
def command(
    context: click.Context, /, words: tuple[str, ...], **options: Any
) -> StudyConfig | ScriptConfig:
    """Returns the settings that the options give."""
    given = {
        name
        for name in options
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    if words:
        _refuse(context, given - _FOR_SCRIPTS, "belongs to studies, not to a script of your own")
        chosen = {name: options[name] for name in _FOR_SCRIPTS}
        return ScriptConfig(script=words[0], arguments=words[1:], **chosen)
    _refuse(context, given & _OF_SCRIPTS_ONLY, "needs the SCRIPT that it is about")
    return StudyConfig(**{k: v for k, v in options.items() if k not in _OF_SCRIPTS_ONLY})


def _refuse(context: click.Context, names: set[str], why: str) -> None:
    for parameter in context.command.params:
        if parameter.name in names:
            raise click.UsageError(f"{parameter.opts[0]} {why}.")
