"""Scripts of Accelerate, Trainer and Lightning are observed and train as they would without us."""

import importlib.util
from pathlib import Path

import pytest

from tests.integration.conftest import run_command

pytestmark = pytest.mark.distributed

SCRIPTS = Path(__file__).parent / "scripts"


def launch(*argv):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return run_command([*start, *argv])


def alone_of(script, tries=4):
    """Runs a script without us. Torch's own threads abort the end of some processes (-6)."""
    for _ in range(tries):
        done = launch(script)
        if done.code == 0:
            break
    return done


def weights_in(text):
    return [line for line in text.splitlines() if line.startswith("weights ")]


@pytest.mark.parametrize(
    ("package", "script", "accumulation"),
    [
        ("accelerate", "with_accelerate.py", 2),
        ("transformers", "with_trainer.py", 4),
        ("lightning", "with_lightning.py", 2),
    ],
)
def test_a_framework_trains_as_without_us(tmp_path, package, script, accumulation):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    alone = alone_of(SCRIPTS / script)
    assert alone.code == 0, alone.err[-2000:]
    ours = ("-m", "ddp_profiler.run", "--steps", 4, "--warmup", 2, "--out", tmp_path / "run")
    seen = launch(*ours, SCRIPTS / script)
    assert seen.code == 0, seen.err[-3000:]
    assert "has failed" not in seen.err
    # Bit for bit the same weights, printed by the first rank.
    assert len(weights_in(alone.out)) == 1
    assert weights_in(seen.out) == weights_in(alone.out)
    seen.folder = tmp_path / "run"
    level = seen.level("script")
    assert (level["micro_batch"], level["accumulation"], level["dp"]) == (4, accumulation, 2)
    assert level["batch_check"]["observed"] == 4 * accumulation * 2
    # The int32 AllReduce that find_unused_parameters adds is no gradient traffic.
    comm = level["comm"]
    assert comm["num_gradient_collectives_per_step"] == comm["num_buckets"]
    # What the framework does by default is no mistake of the script's.
    found = [f for f in seen.summary["findings"] if f["severity"] in ("error", "warning")]
    assert [f for f in found if f["id"] != "straggler"] == []
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
