"""Observing DDP changes nothing in it: weights bit for bit, exit codes, what stays behind."""

import json

import pytest

from tests.integration.conftest import ROOT, run_command, torchrun

pytestmark = pytest.mark.distributed
HERE = ROOT / "tests" / "integration"
CASES = {
    "plain",
    "no_sync",
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "batch_norm",
    "fp16_compress",
    "power_sgd",
    "checkpoint_reentrant",
    "join",
    "deepcopy",
    "device_mesh",
    "compile_ddp",
    "compile_module",
    "sync_norm",
    "sync_norm_async",
    "gather_norm",
    "raising_norm",
    "fp16_with_norm",
    "hooked_before",
    "compile_norm",
}
COMMUNICATING = {
    # (in forward, in backward) of 6 steps
    "sync_norm": (12, 12),
    "sync_norm_async": (12, 12),
    "gather_norm": (6, 0),
    "fp16_with_norm": (6, 6),
    "hooked_before": (6, 0),
}
"""Models with collectives of their own. An async one is the call and its wait."""


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    ranks = request.param
    done = torchrun(ranks, HERE / "adapter_cases.py")
    assert done.code == 0, done.err[-3000:]
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert {row["rank"] for row in rows} == set(range(ranks))
    return rows


def test_every_case_ran(results):
    assert {row["case"] for row in results} == CASES
    assert {row["mechanism"] for row in results} == {"process_group", "comm_hook"}


def test_weights_are_bit_identical(results):
    assert [row for row in results if not row["identical"]] == []


def test_gradient_collectives_are_seen(results):
    for row in results:
        if row["case"] == "hooked_before":
            assert row["gradients"] == 0
            continue
        # The first step uses one bucket fewer or more before DDP rebuilds them.
        assert row["gradients"] >= 6 * row["buckets"] - 6, row
        if row["case"] != "deepcopy":
            assert row["local_ends"] >= 6, row


def test_norms_of_reduced_gradients_are_those_that_ddp_leaves(results):
    for row in results:
        # A hook of the user's reduces by itself, unseen. A rank that joins late trains longer.
        hooked = row["case"] in {"fp16_compress", "power_sgd", "fp16_with_norm", "hooked_before"}
        most = 6 + 2 * row["rank"] if row["case"] == "join" else 6
        assert len(row["norms"]) == (0 if hooked else most), row
        assert max(row["norms"], default=0) < 1e-5, row


def test_broadcasts_and_bookkeeping_are_no_gradients(results):
    by_case = {(r["case"], r["mechanism"]): r for r in results if r["rank"] == 0}
    assert by_case["batch_norm", "process_group"]["broadcasts"] == 6
    assert by_case["plain", "process_group"]["broadcasts"] == 0
    assert by_case["find_unused_parameters", "process_group"]["bookkeeping"] >= 6


def test_collectives_of_modules_are_seen(results):
    for row in results:
        if row["case"] in COMMUNICATING:
            found = row["broadcasts"], row["in_backward"]
            assert found == COMMUNICATING[row["case"]], row


def test_gradient_traffic_is_no_collective_of_a_module(results):
    found = {row["case"] for row in results if row["in_backward"]}
    assert found == {case for case, (_, backward) in COMMUNICATING.items() if backward}
    plain = next(row for row in results if row["case"] == "plain")
    for case in ("sync_norm_async", "gather_norm", "fp16_with_norm"):
        for row in results:
            if row["case"] == case and row["rank"] == plain["rank"]:
                assert row["gradients"] == plain["gradients"], row


def test_nothing_stays_installed(results):
    assert [row for row in results if not (row["restored"] and row["silent_after"])] == []


@pytest.mark.parametrize("mode", ["leave", "bare"])
def test_exit_code_of_an_exception_in_backward_is_unchanged(mode):
    count = 50 if mode == "leave" else 12
    done = run_command([HERE / "exit_codes.py", mode, count])
    assert done.code == 0, done.err[-3000:]
    assert json.loads(done.out) == {"1": count}
