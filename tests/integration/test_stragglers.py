"""A rank that is late is named by an ordinary study: which, why, where, how often."""

import pytest

pytestmark = pytest.mark.distributed

MODEL = "timed:layers=4,parameters=4096"
QUICK = ("--warmup", "2", "--threads-per-rank", "1")
MS = 60


def straggler_of(study, *options, ranks=2, steps=10):
    done = study(ranks, "--dp", str(ranks), "--steps", str(steps), *QUICK, *options)
    assert done.code == 0, done.err[-3000:]
    level = done.level(f"dp{ranks}")
    return level, level["straggler"]


@pytest.mark.parametrize(
    ("rank", "part", "buffers", "cause", "at"),
    [
        (0, "data", 64, "data", "forward_comm"),
        (2, "forward", 64, "forward", "gradient_reduction"),
        (1, "between", 0, "other", "gradient_reduction"),
    ],
)
def test_a_late_rank_is_named(study, rank, part, buffers, cause, at):
    level, found = straggler_of(
        study,
        *("--model", f"{MODEL},buffers={buffers}"),
        *("--plant", f"part={part},ms={MS},rank={rank}"),
        ranks=3,
    )
    assert (found["rank"], found["cause"], found["at"], found["fixed"]) == (rank, cause, at, True)
    # The goal is 5 % + 1 ms on a quiet machine; a busy one delays the others too.
    assert found["lag_ms"] == pytest.approx(MS, abs=15)
    assert found["share_of_steps_fraction"] >= 0.7
    waited = "forward_comm" if at == "forward_comm" else "exposed_wait"
    waits = {r["rank"]: r["breakdown_ms"][waited] for r in level["ranks"]}
    assert waits.pop(rank) < MS / 3
    assert all(wait == pytest.approx(MS, abs=20) for wait in waits.values())


def test_a_passing_straggler_and_a_clock_that_drifts(study):
    """Rank 1 reads a clock that is 5 s ahead and 50 ppm fast, and is late in every fifth step."""
    done = study(
        2,
        *("--dp", "2", "--steps", "20", *QUICK, "--model", MODEL),
        *("--plant", "part=backward,ms=150,every=5,rank=1"),
        *("--plant", "clock=5000,rank=1,ppm=50,real_ms=300"),
    )
    assert done.code == 0, done.err[-3000:]
    level = done.level("dp2")
    found = level["straggler"]
    assert (found["rank"], found["cause"], found["fixed"]) == (1, "backward", False)
    assert found["share_of_steps_fraction"] == pytest.approx(0.2, abs=0.1)
    assert found["lag_ms"] == pytest.approx(150, abs=30)
    assert 0 < level["clock_uncertainty_ms"] < 20
    (clock,) = done.summary["run"]["clocks"]
    assert clock["real_time_offset_ms"] == pytest.approx(300, abs=30)
    assert any("Real time on rank 1's host" in note for note in done.summary["notes"])


def test_bounds_of_a_planted_clock_hold_the_truth(study):
    """The same run: own = base + 5 s + 50e-6 base, so the offset at each reading is known."""
    done = study(
        2,
        *("--dp", "2", "--steps", "20", *QUICK, "--model", MODEL),
        *("--plant", "part=backward,ms=150,every=5,rank=1"),
        *("--plant", "clock=5000,rank=1,ppm=50,real_ms=300"),
    )
    readings = done.run_info["clocks"]
    assert len(readings) == 2
    for reading in readings:
        truth = reading["at_ns"] - (reading["at_ns"] - 5_000_000_000) / (1 + 50e-6)
        assert reading["low_ns"] <= truth <= reading["high_ns"]
