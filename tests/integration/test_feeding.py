"""Mistakes in what feeds training are planted in a script and found; without them it is clean."""

import pytest

from tests.integration.conftest import serious
from tests.integration.test_scripts import SCRIPTS, observe

pytestmark = pytest.mark.distributed

FEEDING = SCRIPTS / "mistakes" / "feeding.py"


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    known = {}

    def run(*arguments):
        if arguments not in known:
            folder = tmp_path_factory.mktemp("fed") / "run"
            # The last --steps counts: waiting is a finding from 8 whole steps on.
            run = observe(folder, 2, "--steps", 12, FEEDING, *arguments)
            assert run.code == 0, run.err
            assert "has failed" not in run.err
            known[arguments] = run
        return known[arguments]

    return run


def findings(run, *, waiting=False):
    """Findings by id; waiting only where it is planted, since a busy machine makes some."""
    found = {f["id"]: f for f in serious(run.summary)}
    if not waiting:
        found.pop("data-waiting", None)
    return found


def test_samples_windows_and_waiting(fed):
    found = findings(fed("wrong", "sampler", "windows", "waiting"), waiting=True)
    assert set(found) == {"same-samples", "incomplete-windows", "data-waiting"}
    assert found["same-samples"]["severity"] == "error"
    windows = found["incomplete-windows"]["evidence"]
    assert windows.startswith("step 3: 1 of 2 micro-steps, 8 samples; step 7: 1 of 2")
    # 2 micro-steps of 4 samples that sleep 5 ms each.
    assert found["data-waiting"]["expected_gain_ms"] > 40
    assert "num_workers=0" in found["data-waiting"]["message"]


def test_without_the_mistakes_there_is_no_finding(fed):
    run = fed("right", "sampler", "windows", "waiting")
    assert findings(run) == {}
    level = run.level("script")
    assert not [note for note in level["batch_check"]["notes"] if "epoch" in note]
    loaders = level["feeding"]["loaders"]
    shares = [(f["rank"], f["loaders"][0]["replica"], len(f["digests"])) for f in loaders]
    assert shares == [(0, 0, 4), (1, 1, 4)]
    epoch = level["feeding"]["epoch"]
    assert (epoch["samples"], epoch["samples_per_rank"], epoch["micro_steps"]) == (96, 48, 12)


def test_each_rank_shuffles_all_samples(fed):
    found = findings(fed("wrong", "shuffled"))
    assert set(found) == {"no-distributed-sampler"}
    assert "RandomSampler over 48 samples" in found["no-distributed-sampler"]["evidence"]


def test_unequal_ranks(fed):
    run = fed("wrong", "unequal")
    found = findings(run)
    assert set(found) == {"unequal-ranks"}
    assert found["unequal-ranks"]["evidence"] == (
        "samples a micro-step: 2 on rank 1, 4 on rank 0; "
        "micro-batches an epoch: 11 on rank 1, 12 on rank 0"
    )
    assert "a sample of rank 1 weighs 2 times one of rank 0" in found["unequal-ranks"]["message"]
    # Said while the script runs: at the end of an epoch it might be too late.
    assert "micro-batches of an epoch: 11 on rank 1, 12 on rank 0. " in run.err
    check = run.level("script")["batch_check"]
    assert (check["configured"], check["observed"], check["ok"]) == (8, 6, False)


def test_known_tokens(tmp_path):
    run = observe(tmp_path / "run", 2, SCRIPTS / "token_lengths.py", "mask")
    assert run.code == 0, run.err
    level = run.level("script")
    tokens = level["feeding"]["tokens"]
    # Places 2 x (4, 8 or 12) on rank 0 and 2 more each on rank 1; a quarter is padding.
    assert (tokens["step_min"], tokens["step_median"], tokens["step_max"]) == (15, 27, 39)
    assert [(r["step_min"], r["step_max"]) for r in tokens["ranks"]] == [(6, 18), (9, 21)]
    assert tokens["padding_fraction"] == 0.25
    # Steps 4 to 7 have marks: 8, 12, 4, 8 places and 2 more.
    expected = (2 * 10 / 9 + 14 / 13 + 6 / 5) / 4
    assert tokens["imbalance"] == pytest.approx(expected)
    # Plain are steps 2, 3, 8, 9: tokens 39, 15, 39, 15.
    assert tokens["step_mean"] == 27
    assert level["tokens_per_s"] == pytest.approx(27e3 / level["step_ms"]["mean"])
    assert level["batch_check"]["observed"] == 4
    assert "6 to 21 a step and rank, beside 25.0 % padding" in level["batch_check"]["notes"][0]
    assert findings(run) == {}
