"""The documents name every figure, column, kind and variant that there is."""

import dataclasses
import re
from pathlib import Path

import pytest

from ddp_profiler.analysis import results
from ddp_profiler.analysis.allreduce import AllReduceResult, AllReduceSize
from ddp_profiler.analysis.comparability import Comparability, Difference, Pairing
from ddp_profiler.analysis.compare import Comparison, LeastSeen
from ddp_profiler.analysis.comparison import Check, LevelComparison, RowComparison
from ddp_profiler.analysis.data_sheets import DataSheet
from ddp_profiler.analysis.feeding import Feeding, RankBatch, RankTokens, Tokens
from ddp_profiler.analysis.left_out import IncompleteStep
from ddp_profiler.analysis.link import Link
from ddp_profiler.analysis.micro_batch import MicroBatchCurve, MicroBatchPoint
from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.reduction import Broadcast, Cause, Differing, Reduction
from ddp_profiler.analysis.roofline import Bound, Hardware, Roofline
from ddp_profiler.analysis.sampled import SampledWindow
from ddp_profiler.analysis.scaling import Pop
from ddp_profiler.batch import Epoch
from ddp_profiler.cli import worker_options
from ddp_profiler.predict.plan import Alternative, Plan
from ddp_profiler.predict.step_time import StepTime
from ddp_profiler.schema import (
    CONDENSED_COLUMNS,
    SCHEMA_VERSION,
    SPAN_COLUMNS,
    CopyRate,
    DdpFacts,
    DevicePeaks,
    GpuUse,
    Interruption,
    LinkStreams,
    LoaderFacts,
    MachineUse,
    MicroBatchSearch,
    MicroBatchTrial,
    OperationCount,
    OperationGroup,
    OptimizedParameter,
    RankFeed,
    RunInfo,
    SpanKind,
    Variant,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"


def words(name: str) -> set[str]:
    """All that stands in backquotes."""
    return set(re.findall(r"`([^`\n]+)`", (DOCS / name).read_text()))


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_metrics():
    figures = {*PARTS, "samples_per_s", "tokens_per_s", "step_ms", "instrumented_step_ms"}
    figures |= {
        "speedup",
        "efficiency",
        "mfu",
        "contention_ms",
        "wrapper_ms",
        "waterfall_ms",
        "pop",
    }
    figures |= {"allreduce", "gradient_ready", "costs_ms"}
    figures |= {"straggler", "stragglers", "clock_uncertainty_ms"}
    kinds = (results.Communication, results.BatchCheck, results.Overhead, results.Straggler)
    figures |= {"crossing_ms", "crossing_ci95_ms", "crossing_fraction"}
    figures |= {"link", "ring_bound_ms", "buckets_ring_bound_ms", *fields(Link)}
    of_feeding = (Feeding, RankBatch, Tokens, IncompleteStep, Epoch)
    of_reduction = (Reduction, Broadcast, Differing)
    of_hardware = (Hardware, DataSheet, Roofline)
    others = (MachineUse, SampledWindow, MicroBatchCurve)
    for kind in (*kinds, *of_hardware, *of_feeding, *of_reduction, *others):
        figures |= fields(kind) - {"rank"}
    assert figures - words("metrics.md") == set()


@pytest.mark.parametrize(
    "kind",
    [
        RunInfo,
        MachineUse,
        GpuUse,
        results.Summary,
        results.RunResult,
        results.LevelResult,
        results.RankResult,
        results.Communication,
        results.BatchCheck,
        results.Overhead,
        results.Distribution,
        results.Finding,
        results.GradientReady,
        results.ClockOffset,
        results.Straggler,
        AllReduceResult,
        AllReduceSize,
        Link,
        LinkStreams,
        StepCosts,
        Pop,
        RankFeed,
        LoaderFacts,
        Feeding,
        RankBatch,
        RankTokens,
        Tokens,
        IncompleteStep,
        Epoch,
        Reduction,
        Broadcast,
        Differing,
        SampledWindow,
        DdpFacts,
        OptimizedParameter,
        Hardware,
        DataSheet,
        Roofline,
        OperationCount,
        OperationGroup,
        DevicePeaks,
        CopyRate,
        MicroBatchSearch,
        MicroBatchTrial,
        MicroBatchCurve,
        MicroBatchPoint,
    ],
)
def test_keys(kind):
    assert fields(kind) - words("file-format.md") == set()


def test_bounds():
    assert set(Bound) - words("metrics.md") == set()
    assert set(Bound) - words("file-format.md") == set()


@pytest.mark.parametrize("kind", [Plan, Alternative, StepTime])
def test_keys_of_plans(kind):
    assert fields(kind) - words("plan.md") == set()


@pytest.mark.parametrize(
    "kind",
    [
        Comparison,
        Comparability,
        Difference,
        Pairing,
        LeastSeen,
        Check,
        LevelComparison,
        RowComparison,
    ],
)
def test_keys_of_comparisons(kind):
    assert fields(kind) - words("compare.md") == set()


def test_causes():
    assert set(Cause) - words("metrics.md") == set()


def test_text_about_the_batch_stands_under_the_batch():
    """A heading between a figure and its explanation makes it that of something else."""
    text = (DOCS / "metrics.md").read_text()
    headings = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    sections = dict(zip(headings[1::2], headings[2::2], strict=True))
    of_feeding = sections["What feeds training (`feeding`, scripts only)"]
    for figure in fields(results.BatchCheck) - {"notes"}:
        assert f"**`{figure}`**" not in of_feeding, figure


def test_folders_and_benchmarks_that_are_named_are_there():
    root = DOCS.parent
    text = (root / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"^\| `((?:tests|benchmarks)/[a-z_]*)` \|", text, flags=re.MULTILINE):
        assert (root / name).is_dir(), name
    listed = text + (root / "benchmarks" / "README.md").read_text()
    for path in (root / "benchmarks").glob("*.py"):
        assert f"`{path.name}`" in listed, path.name


def test_columns_kinds_and_variants():
    text = (DOCS / "file-format.md").read_text()
    for name, kind in (*SPAN_COLUMNS, *CONDENSED_COLUMNS):
        assert f"| `{name}` | {kind}" in text
    for member in (*SpanKind, *Variant):
        assert f"| {member.value} | `{member.name}` |" in text
    for reason in Interruption:
        assert f"{reason.value} `{reason.name}`" in text
    assert f"| `schema_version` | {SCHEMA_VERSION} |" in text


def test_options_of_scripts():
    names = {option for row in words("scripts.md") for option in row.split()}
    for parameter in worker_options.command.params:
        if parameter.name in worker_options._FOR_SCRIPTS:
            assert parameter.opts[0] in names
