"""A study with --kineto: traces of every rank of every level, and figures as without it."""

import json

import pytest

from tests.integration.conftest import run_command


@pytest.mark.distributed
def test_both_records_of_the_same_steps(study):
    done = study(
        2, "--model", "timed:layers=3,parameters=40000", "--bucket-cap-mb", "0.1", "--dp", "1,2",
        "--steps", "2", "--warmup", "2", "--micro-batch", "2", "--kineto", "2",
    )  # fmt: skip
    assert done.code == 0, done.err[-3000:]
    assert "torch.profiler failed" not in done.err
    assert sorted(str(p.relative_to(done.folder)) for p in done.folder.rglob("*.json*")) == [
        "kineto/dp1/rank-00000.json.gz",
        "kineto/dp2/rank-00000.json.gz",
        "kineto/dp2/rank-00001.json.gz",
        "run.json",
        "summary.json",
    ]
    # 2 steps of warm-up and no more, however many ran under torch.profiler.
    assert [level["warmup_steps"] for level in done.summary["levels"]] == [2, 2]
    assert [level["steps"] for level in done.summary["levels"]] == [2, 2]

    shown = run_command(["-m", "ddp_profiler.cli", "trace", done.folder, "--json"])
    assert shown.code == 0, shown.err[-3000:]
    found = json.loads(shown.out)
    assert [level["world_size"] for level in found["levels"]] == [1, 2]
    assert [(one["level"], one["rank"]) for one in found["compared"]] == [
        ("dp1", 0),
        ("dp2", 0),
        ("dp2", 1),
    ]
    for one in found["compared"]:
        assert [step["step"] for step in one["steps"]] == [2, 3]
        assert one["ours"]["collectives"] == one["theirs"]["collectives"] > 2
        assert one["ours"]["bytes"] == one["theirs"]["bytes"] > 0
        # Ours begins before it and ends after it.
        assert one["ours"]["in_flight_us"] > 0.5 * one["theirs"]["in_flight_us"] > 0

    table = run_command(["-m", "ddp_profiler.cli", "trace", done.folder])
    assert table.out.count("The same steps in our own record") == 2
    assert max(map(len, table.out.splitlines())) <= 80
