"""The gradient noise scale of a model of which it is known, and where its norms are taken."""

import numpy as np
import pytest

from ddp_profiler.record import reader
from ddp_profiler.schema import SpanKind, Variant
from tests.integration.noise_model import truth

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def run(study):
    model = "tests.integration.noise_model:make"
    options = ("--steps", "6", "--warmup", "2", "--bucket-cap-mb", "0.001")
    done = study(2, "--model", model, "--dp", "2", "--accumulate", "1,4", *options)
    assert done.code == 0, done.err[-3000:]
    return done


@pytest.mark.parametrize(("name", "small", "large"), [("dp2-acc1", 8, 16), ("dp2-acc4", 32, 64)])
def test_known_noise_scale_is_found(run, name, small, large):
    found = run.level(name)["noise_scale"]
    assert (found["small_batch"], found["large_batch"]) == (small, large)
    assert found["steps"] == 6
    low, high = found["ci95"]
    assert low < truth() < high
    # It says something: a factor of 2 would not be within.
    assert high < 2 * truth() < 4 * low
    assert found["reason"] is None


def test_meaning_is_shown(run):
    (finding,) = (f for f in run.summary["findings"] if f["id"] == "noise-scale")
    assert finding["message"].startswith("dp2-acc4: global batch 64 is above the gradient noise")
    assert "noise scale (samples)" in run.out


def test_measured_steps_pay_nothing(run):
    for rank in (0, 1):
        columns = reader.read_rank(run.folder, rank).columns
        kinds = (SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM)
        taken = np.isin(columns["kind"], kinds)
        assert taken.any()
        assert set(columns["variant"][taken].tolist()) == {Variant.NOISE}
