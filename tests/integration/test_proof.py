"""The batch proof on real process groups: rounding, planted factors, and what is left behind."""

import json

import pytest

from tests.integration.conftest import ROOT, torchrun

pytestmark = pytest.mark.distributed
SCRIPT = ROOT / "tests" / "integration" / "proof_cases.py"
OWN_SPLIT = "need not equal those of one process"


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    return request.param


@pytest.fixture(scope="module")
def rows(ranks):
    done = torchrun(ranks, SCRIPT, timeout=400)
    assert done.code == 0, done.err[-3000:]
    return [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def proofs(rows):
    """The proof of each case, once it is the same on all ranks."""
    found = {}
    for row in rows:
        if "ranks_agree" in row:
            own = {key: value for key, value in row.items() if key != "rank"}
            assert found.setdefault(row["case"], own) == own
    return found


def test_gradients_are_those_of_one_process(proofs, ranks):
    cases = [name for name in proofs if name.startswith(("gpt-tiny", "mlp"))]
    assert len(cases) == (12 if ranks == 2 else 6)
    for case in cases:
        proof = proofs[case]
        assert proof["ranks_agree"] is True
        assert proof["max_rel_error"] <= 1e-5, case
        assert proof["factor"] == pytest.approx(1, abs=1e-6)
        assert proof["factor_name"] is None
        assert proof["worst_tensor"]
        assert proof["notes"] == []
    # Rounding differs where sums are taken in another order: it is another computation.
    assert proofs[f"gpt-tiny dp {ranks} accumulation 4"]["max_rel_error"] > 0


def test_planted_factors_are_found_and_named(proofs, ranks):
    for case, factor, name in (
        ("times dp", ranks, "dp"),
        ("times accumulation", 4, "accumulation"),
        ("times both", 4 * ranks, "dp x accumulation"),
        ("equal settings", ranks, "dp or accumulation"),
        ("over accumulation", 1 / 4, "1/accumulation"),
        ("out of memory times dp", ranks, "dp"),
    ):
        proof = proofs[case]
        assert proof["factor"] == pytest.approx(factor, rel=1e-5), case
        assert proof["max_rel_error"] == pytest.approx(abs(factor - 1), rel=1e-4), case
        assert proof["factor_name"] == name
        assert proof["ranks_agree"] is True
    assert proofs["bfloat16 times dp"]["factor_name"] == "dp"
    assert proofs["times 7"]["factor"] == pytest.approx(7, rel=1e-5)
    assert proofs["times 7"]["factor_name"] is None


def test_a_sum_over_samples_is_told_from_a_mean(proofs, ranks):
    proof = proofs["sum"]
    assert proof["factor"] == pytest.approx(1 / (4 * ranks), rel=1e-5)
    assert proof["factor_name"] == "1/(dp x accumulation)"
    assert "sum over the micro-batch's samples" in proof["notes"][0]


@pytest.mark.parametrize(
    "case", ["last ranks", "timed", "encoder", "list", "unused", "quick", "key bias"]
)
def test_other_models_and_groups(proofs, case):
    assert proofs[case]["max_rel_error"] <= 1e-5
    assert proofs[case]["factor_name"] is None
    assert proofs[case]["ranks_agree"] is True
    assert len(proofs[case]["notes"]) == (case == "key bias")


@pytest.mark.parametrize(
    ("case", "note"), [("batch norm", "BatchNorm in training mode"), ("dropout", "Dropout modules")]
)
def test_where_equality_need_not_hold_the_proof_says_so(proofs, case, note):
    proof = proofs[case]
    assert proof["max_rel_error"] > 1e-3
    assert proof["factor_name"] is None
    assert proof["ranks_agree"] is True
    assert len(proof["notes"]) == 1
    assert proof["notes"][0].startswith(note)
    assert OWN_SPLIT in proof["notes"][0]
    # One micro-step of one rank: the same samples from the same state.
    assert proofs[f"{case} alone"]["max_rel_error"] <= 1e-6
    assert proofs[f"{case} alone"]["notes"] == []


def test_uneven_micro_batches_are_named(proofs):
    assert proofs["uneven"]["notes"] == [
        "Micro-batches have from 3 to 4 samples: the mean of their means need not be the mean "
        "over samples."
    ]
    assert proofs["uneven"]["max_rel_error"] > 1e-3


def test_a_single_differing_bit_on_one_rank_is_seen(proofs):
    proof = proofs["one bit"]
    assert proof["ranks_agree"] is False
    assert proof["notes"] == [
        "Reduced gradients differ between ranks: blocks.0.attention_norm.weight."
    ]
    assert proof["max_rel_error"] <= 1e-5


def test_what_takes_too_long_is_left_out_on_all_ranks(proofs, ranks):
    proof = proofs["slow"]
    assert proof["ranks_agree"] is True
    assert proof["max_rel_error"] is None
    assert proof["factor"] is None
    assert proof["notes"] == [
        f"Not compared with one process: it would take about {200 * ranks} s for the whole "
        "global batch, more than the 20 s allowed."
    ]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("error", "KeyError: 'sorry'"),
        ("collective", "RuntimeError: the model issues a collective of its own"),
        ("unpicklable", "ValueError: the micro-batches of a rank cannot be pickled"),
    ],
)
def test_a_failure_of_the_first_rank_reaches_all(proofs, case, why):
    proof = proofs[case]
    assert proof["ranks_agree"] is True
    assert proof["max_rel_error"] is None
    assert len(proof["notes"]) == 1
    assert proof["notes"][0].startswith(f"Not compared with one process: {why}")


def test_too_little_memory_is_worked_around(proofs):
    proof = proofs["out of memory"]
    assert proof["max_rel_error"] <= 1e-5
    assert len(proof["notes"]) == 1
    assert "too little memory for the whole global batch" in proof["notes"][0]


def test_everything_is_left_as_it_was(rows, ranks):
    proofs = [row for row in rows if "ranks_agree" in row]
    assert {row["rank"] for row in proofs} == set(range(ranks))
    assert [row for row in proofs if not row["restored"]] == []
    assert len({tuple(row["backends"]) for row in proofs}) == 1
    assert "tf32" in proofs[0]["backends"]  # cuDNN's default, which the proof turns off.
    trained = [row["same"] for row in rows if row["case"] == "trains on"]
    assert trained == [True] * ranks


def test_synchronised_batch_norm_runs_alone(rows, ranks):
    found = [(row["equal"], row["refused"]) for row in rows if row["case"] == "sync"]
    assert found == [(True, True)] * ranks
