"""``ddp-profiler predict``: step time at scales and settings that were not measured."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ddp_profiler.cli import ascii_json, write_out


@click.command("predict")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--dp", required=True, help="Numbers of replicas to predict, such as 8,16,64.")
@click.option(
    "--bandwidth-gbps",
    type=float,
    help="Rate of the links that bound the AllReduce, in Gbit/s: between nodes, or within the "
    "node where there is one.",
)
@click.option("--bucket-cap-mb", type=float, help="Size limit of DDP's buckets, in MB of 2**20 B.")
@click.option("--accumulate", type=int, help="Micro-steps in an optimizer step.")
@click.option(
    "--gradient-dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Data type in which gradients travel, as with a compressing hook.",
)
@click.option("--ranks-per-node", type=int, help="Ranks on a node; as in the run by default.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    run: Path,
    dp: str,
    bandwidth_gbps: float | None,
    bucket_cap_mb: float | None,
    accumulate: int | None,
    gradient_dtype: str | None,
    ranks_per_node: int | None,
    as_json: bool,
) -> None:
    """Predict the step of RUN at other scales and settings, with its error.

    RUN is the folder of a study (torchrun -m ddp_profiler.run without a script).
    DDP's schedule is replayed: when each gradient is ready, how they are packed
    into buckets, what each AllReduce takes, and how long ranks wait for the last
    one. What is not given stays as it was measured. Every measured level is also
    predicted from the others, which shows how far to trust the rest.

    \b
    Examples:
        ddp-profiler predict runs/NAME --dp 8,16,64
        ddp-profiler predict runs/NAME --dp 8 --bandwidth-gbps 25
        ddp-profiler predict runs/NAME --dp 8 --bucket-cap-mb 100 --accumulate 4
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what reading a run needs.
    import json

    from ddp_profiler.config import parse_numbers
    from ddp_profiler.load import load_summary
    from ddp_profiler.predict.prediction import Predictor
    from ddp_profiler.predict.request import Request
    from ddp_profiler.report import predictions
    from ddp_profiler.report.text import for_encoding

    requests = [
        Request(
            dp=number,
            accumulation=accumulate,
            bucket_cap_mb=bucket_cap_mb,
            bandwidth_gbps=bandwidth_gbps,
            gradient_dtype=gradient_dtype,
            ranks_per_node=ranks_per_node,
        )
        for number in dict.fromkeys(parse_numbers("--dp", dp))
    ]
    predictor = Predictor.of(load_summary(run))
    run_of = predictor.evidence.summary.run
    found = [predictor.predict(request) for request in requests]
    tests = predictor.back_test()
    networks = [
        model for kind in (False, True) if (model := predictor.evidence.network(kind)) is not None
    ]
    encoding = getattr(sys.stdout, "encoding", None)
    if as_json:
        content = predictions.as_json(run_of, found, tests, networks)
        text = json.dumps(content, indent=2, ensure_ascii=False)
        write_out(ascii_json(text, encoding) + "\n")
        return
    color = sys.stdout is not None and sys.stdout.isatty()
    text = predictions.render(run_of, found, tests, networks, color=color)
    write_out(for_encoding(text, encoding))
