"""Scripts of Accelerate, Trainer and Lightning are observed and train as they would without us.

They do what real training does: several epochs, bfloat16, clipping, evaluation and checkpoints.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from ddp_profiler.record import reader
from ddp_profiler.schema import Interruption, SpanKind, Variant
from tests.integration.conftest import serious, torchrun, unaborted

pytestmark = pytest.mark.distributed

SCRIPTS = Path(__file__).parent / "scripts"


def weights_in(text):
    return [line for line in text.splitlines() if line.startswith("weights ")]


CASES = {
    "accelerate": ("bf16 clip evaluate save", 2, [6], 9, ("clip", "step", "zero")),
    # Trainer clips unless told otherwise, and sets gradients to zero by the module.
    "transformers": ("bf16 evaluate save", 4, [4, 8], 6, ("clip", "step")),
    "lightning": ("bf16 clip evaluate save", 2, [4, 8], 8, ("zero", "clip", "step")),
}
RANKS = {"accelerate": 3, "transformers": 2, "lightning": 2}
"""What a run of all tests has time for."""
ALL_RANKS = bool(os.environ.get("DDP_PROFILER_ALL_RANKS"))


@pytest.mark.parametrize(
    ("package", "ranks"),
    [(package, n) for package in CASES for n in (2, 3) if ALL_RANKS or n == RANKS[package]],
)
def test_a_framework_trains_as_without_us(tmp_path, package, ranks):
    words, accumulation, evaluated, saved, of_optimizer = CASES[package]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    name = {"transformers": "trainer"}.get(package, package)
    script = [SCRIPTS / f"with_{name}.py", *words.split()]
    alone = unaborted(lambda: torchrun(ranks, *script))
    assert alone.code == 0, alone.err[-2000:]
    ours = ("-m", "ddp_profiler.run", "--steps", 4, "--warmup", 3, "--out", tmp_path / "run")
    ours += ("--replay", f"framework_oracles:{package}")
    seen = torchrun(ranks, *ours, *script)
    assert seen.code == 0, seen.err[-3000:]
    assert "has failed" not in seen.err
    # Bit for bit the same weights, and the same losses, printed by the first rank.
    assert len(weights_in(alone.out)) == 1
    assert weights_in(seen.out) == weights_in(alone.out)
    seen.folder = tmp_path / "run"
    level = seen.level("script")
    assert (level["micro_batch"], level["accumulation"], level["dp"]) == (4, accumulation, ranks)
    assert level["batch_check"]["observed"] == 4 * accumulation * ranks
    # Gradients are those of one process, whatever the framework's loader fetches ahead.
    check = level["batch_check"]
    assert check["gradient_factor"] == pytest.approx(1, abs=1e-4), check["notes"]
    # In bf16.
    assert check["gradient_max_rel_error"] < 0.03
    assert check["gradient_must_match"]
    # The int32 AllReduce that find_unused_parameters adds is no gradient traffic.
    comm = level["comm"]
    assert comm["num_gradient_collectives_per_step"] == comm["num_buckets"]
    # What the framework does by default is no mistake of the script's.
    assert serious(seen.summary) == []
    builder = "lightning" if package == "lightning" else "accelerate"
    assert seen.run_info["facts"][0]["built_by"] == builder
    reduction = level["reduction"]
    assert reduction["framework"] == builder
    searches = [note for note in level["notes"] if "find_unused_parameters" in note]
    assert len(searches) == reduction["searches"] == (package == "transformers")
    assert level["batch_check"]["ranks_agree"] is True
    assert reduction["compared"] == len(seen.run_info["facts"][0]["reduced"])
    parts = level["breakdown_ms"]
    assert sum(parts.values()) == pytest.approx(level["instrumented_step_ms"]["mean"])
    assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0

    evaluation, saving = level["notes"][:2]
    steps = f"step{'s' if len(evaluated) > 1 else ''} {', '.join(map(str, evaluated))}."
    assert evaluation.startswith(f"{len(evaluated)} of 8 steps hold evaluation (mean ")
    assert evaluation.endswith(f"and are left out of all figures: {steps}")
    assert saving.startswith("1 of 8 steps hold saving (mean ")
    assert saving.endswith(f"and are left out of all figures: step {saved}.")
    check_rank_0(tmp_path / "run", {*evaluated}, saved, len(of_optimizer))


def check_rank_0(folder, evaluated, saved, of_optimizer):
    spans = reader.read_rank(folder, 0).columns
    is_one = (spans["kind"] == SpanKind.INTERRUPTION) & (spans["variant"] != Variant.WARMUP)
    found = {}
    for step, reason in zip(spans["step"][is_one], spans["index"][is_one], strict=True):
        found.setdefault(Interruption(reason), set()).add(int(step))
    assert found == {Interruption.EVALUATION: evaluated, Interruption.CHECKPOINT: {saved}}
    ends = (spans["kind"] == SpanKind.OPTIMIZER) & (spans["variant"] == Variant.INSTRUMENTED)
    for step in set(spans["step"][ends].tolist()):
        assert (spans["step"][ends] == step).sum() == of_optimizer, step
