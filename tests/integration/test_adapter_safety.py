"""Observing DDP changes nothing in it: weights bit for bit, exit codes, what stays behind."""

import json

import pytest

from tests.integration.conftest import ROOT, run_command

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
}


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    ranks = request.param
    done = run_command(
        [
            *("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"),
            HERE / "adapter_cases.py",
        ]
    )
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
        # The first step uses one bucket fewer or more before DDP rebuilds them.
        assert row["gradients"] >= 6 * row["buckets"] - 6, row
        if row["case"] != "deepcopy":
            assert row["local_ends"] >= 6, row


def test_broadcasts_and_bookkeeping_are_no_gradients(results):
    by_case = {(r["case"], r["mechanism"]): r for r in results if r["rank"] == 0}
    assert by_case["batch_norm", "process_group"]["broadcasts"] == 6
    assert by_case["plain", "process_group"]["broadcasts"] == 0
    assert by_case["find_unused_parameters", "process_group"]["bookkeeping"] >= 6


def test_nothing_stays_installed(results):
    assert [row for row in results if not (row["restored"] and row["silent_after"])] == []


@pytest.mark.parametrize("mode", ["leave", "bare"])
def test_exit_code_of_an_exception_in_backward_is_unchanged(mode):
    count = 50 if mode == "leave" else 12
    done = run_command([HERE / "exit_codes.py", mode, count])
    assert done.code == 0, done.err[-3000:]
    assert json.loads(done.out) == {"1": count}
