"""The scale of a script's gradients, against the loss that one process would have (--replay)."""

import json
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, run_command, serious, torchrun, unaborted

pytestmark = pytest.mark.distributed
MISTAKES = Path(__file__).parent / "scripts" / "mistakes"


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """The proof of each case of replay_cases.py: accumulation 3, micro-batch 5 and dp 2, or 1, 4
    and 2."""
    cases = ROOT / "tests" / "integration" / "replay_cases.py"
    done = torchrun(2, cases, tmp_path_factory.mktemp("replay"))
    assert done.code == 0, done.err[-3000:]
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert all(row["failures"] == [] for row in rows)
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize(
    ("case", "factor", "name"),
    [
        ("accumulation", 3, "accumulation"),
        ("dp", 2, "dp"),
        ("both", 6, "dp x accumulation"),
        ("sum", 5, "micro-batch"),
        ("dp clip scaler", 2, "dp"),
        ("compiled", 2, "dp"),
    ],
)
def test_a_wrong_scale_is_named(proofs, case, factor, name):
    proof = proofs[case]
    assert proof["factor"] == pytest.approx(factor, rel=1e-5)
    assert proof["factor_name"] == name
    assert proof["must_be_equal"]
    assert not proof["unexplained"]
    assert proof["notes"] == ["Step 3 of the script, in its warm-up, against oracle:loss."]


@pytest.mark.parametrize(
    "case",
    ["right", "clip", "clip scaler", "ahead", "reshaped", "views", "two models", "closure"],
)
def test_a_right_scale_is_right(proofs, case):
    proof = proofs[case]
    assert proof["factor"] == pytest.approx(1, abs=1e-6)
    assert proof["max_rel_error"] < 1e-5
    assert proof["factor_name"] is None
    assert proof["must_be_equal"]
    assert len(proof["notes"]) == 1


def test_autocast_is_compared_by_its_rounding(proofs):
    right, wrong = proofs["autocast"], proofs["dp autocast scaler"]
    assert right["max_rel_error"] > 1e-3
    assert (right["factor"], right["factor_name"], right["unexplained"]) == (1.0, None, False)
    assert wrong["factor_name"] == "dp"
    for proof in (right, wrong):
        assert proof["must_be_equal"]
        assert "a relative rounding of 0.008" in proof["notes"][1]


@pytest.mark.parametrize(
    ("case", "note"),
    [
        ("changed on the way", "Which batches entered the model could not be seen"),
        ("uneven", "Micro-batches have from 3 to 4 samples"),
        ("uneven dp", "Micro-batches have from 3 to 4 samples"),
        ("batch norm", "BatchNorm in training mode"),
        ("dropout", "Dropout modules are active"),
        ("hook", "A communication hook of the script"),
    ],
)
def test_where_equality_need_not_hold_it_says_so(proofs, case, note):
    proof = proofs[case]
    assert not proof["must_be_equal"]
    assert not proof["unexplained"]
    assert proof["notes"][1].startswith(note)
    # A clean factor is told all the same: fp16 on the way hides no 2.
    assert proof["factor_name"] == ("dp" if case == "hook" else None)
    assert (proof["max_rel_error"] < 1e-5) == (case == "changed on the way")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("closures", "weights changed before the step's last backward"),
        ("no loader", "no DataLoader gave a batch in step 3"),
        ("uncopied", "the model cannot be copied (TypeError: planted: holds a socket)"),
        ("own collective", "oracle:loss raised RuntimeError: the model issues a collective"),
        ("raises", "oracle:loss raised ValueError: planted ("),
        ("exits", "oracle:loss raised SystemExit: 3 ("),
        ("no loss", "oracle:loss returned Tensor(2,), not a loss of one number"),
        ("a rank's file is lost", "the micro-batches of rank 1 are not in "),
        ("incomplete", "step 3 was incomplete, 1 of 2 micro-steps; another --warmup"),
        ("overflow", "The level's gradient of 0.weight is not finite."),
    ],
)
def test_what_cannot_be_compared_has_its_reason(proofs, case, why):
    proof = proofs[case]
    assert proof["factor"] is proof["max_rel_error"] is proof["factor_name"] is None
    assert not proof["unexplained"]
    if case == "overflow":
        assert proof["notes"][1:] == ["Another --warmup takes another step.", why]
        return
    assert len(proof["notes"]) == 1
    assert proof["notes"][0].startswith(f"Not compared with one process: {why}")
    assert "\n" not in proof["notes"][0]


def command(folder, *words, oracle="oracle:loss"):
    ours = ("-m", "ddp_profiler.run", "--steps", 2, "--warmup", 4, "--replay", oracle)
    return (*ours, "--out", folder, MISTAKES / "gradient_scale.py", *words)


def observe(folder, *words):
    done = torchrun(2, *command(folder, *words))
    done.folder = folder
    return done


def test_a_script_of_the_wrong_scale(tmp_path):
    words = ("both", "clip", "scaler")
    alone = unaborted(lambda: torchrun(2, MISTAKES / "gradient_scale.py", *words))
    assert alone.code == 0, alone.err
    run = observe(tmp_path / "run", *words)
    assert run.code == 0, run.err
    # Losses and the digest of the weights, bit for bit; what the function prints goes to stderr.
    assert run.out == alone.out != ""
    assert "oracle: 6 micro-batches" in run.err
    check = run.level("script")["batch_check"]
    assert check["gradient_factor"] == pytest.approx(6, rel=1e-5)
    assert check["gradient_factor_name"] == "dp x accumulation"
    assert check["notes"] == ["Step 2 of the script, in its warm-up, against oracle:loss."]
    (found,) = (f for f in run.summary["findings"] if f["severity"] == "error")
    assert found["id"] == "gradient-scale"
    assert found["message"].endswith("that is dp x accumulation.")
    assert not list(run.folder.glob(".replay*"))
    assert run.run_info["status"] == "complete"
    assert run.run_info["settings"]["replay"] == "oracle:loss"


def test_a_script_of_the_right_scale(tmp_path):
    run = observe(tmp_path / "run", "right", "clip", "scaler", "autocast")
    assert run.code == 0, run.err
    check = run.level("script")["batch_check"]
    assert (check["gradient_factor"], check["gradient_must_match"]) == (1.0, True)
    assert serious(run.summary) == []
    assert "gradient error" in run.err
    # Beside the division, as it was: the scaler's own factor is no divisor.
    assert run.run_info["facts"][0]["loss_divisor"] == 3


def test_a_wrong_name_ends_it_before_training_begins(tmp_path):
    run = run_command(command(tmp_path / "run", "right", oracle="oracle:los"))
    assert (run.code, run.out) == (2, "")
    first, remedy = run.err.splitlines()
    assert "--replay oracle:los: module oracle (" in first
    assert first.endswith("has no los; did you mean loss?")
    assert "docs/scripts.md" in remedy
    assert not (tmp_path / "run").exists()
