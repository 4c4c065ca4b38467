"""What is planted in the timed model is found, in the part where it was planted."""

import pytest

pytestmark = pytest.mark.distributed

FORWARD, BACKWARD = 8 * 5.0, 8 * 10.0
EXPOSED = ("exposed_wait", "exposed_transfer", "exposed_copy")
QUICK = ("--model", "timed", "--steps", "6", "--warmup", "2")


def tolerance(planted):
    """The goal is 2 % + 1 ms on a quiet machine; a test must also hold on a busy one."""
    return 0.05 * planted + 3


@pytest.fixture(scope="module")
def plain(study):
    done = study(2, *QUICK, "--threads-per-rank", "1")
    assert done.code == 0, done.err[-3000:]
    return done


@pytest.mark.parametrize("level", ["dp1", "dp2"])
def test_forward_and_backward_take_their_planted_time(plain, level):
    parts = plain.level(level)["breakdown_ms"]
    assert parts["forward"] == pytest.approx(FORWARD, abs=tolerance(FORWARD))
    assert parts["backward"] == pytest.approx(BACKWARD, abs=tolerance(BACKWARD))


@pytest.mark.parametrize("level", ["dp1", "dp2"])
def test_parts_sum_to_the_step(plain, level):
    found = plain.level(level)
    assert sum(found["breakdown_ms"].values()) == pytest.approx(
        found["instrumented_step_ms"]["mean"], rel=1e-3
    )


@pytest.mark.parametrize("level", ["dp1", "dp2"])
def test_little_is_left_over(plain, level):
    found = plain.level(level)
    other, step = found["breakdown_ms"]["other"], found["instrumented_step_ms"]["mean"]
    assert -0.001 <= other <= 0.01 * step + 0.2


def test_the_hardware_is_measured_once(plain):
    hardware = plain.summary["run"]["hardware"]
    assert hardware["flops_per_s"] > hardware["memory_bytes_per_s"] > 0
    assert (hardware["data_sheet"], hardware["data_sheet_reason"]) == (None, None)
    devices = [facts["device"] for facts in plain.run_info["facts"]]
    assert devices[0] == devices[1]
    # Layers that sleep are near no roof.
    assert [level["roofline"]["bound"] for level in plain.summary["levels"]] == ["none", "none"]


def test_no_communication_without_peers(plain):
    found = plain.level("dp1")
    assert found["comm"]["overlap_fraction"] is None
    assert found["breakdown_ms"]["exposed_wait"] == 0
    assert found["breakdown_ms"]["exposed_transfer"] == 0
    assert plain.level("dp2")["comm"]["busy_ms"] > 0


def test_time_between_forward_and_backward_is_other(study, plain):
    done = study(2, *QUICK, "--plant", "part=between,ms=200")
    for name in ("dp1", "dp2"):
        parts, reference = done.level(name)["breakdown_ms"], plain.level(name)["breakdown_ms"]
        assert parts["other"] == pytest.approx(200, abs=tolerance(200))
        assert parts["backward"] == pytest.approx(reference["backward"], abs=tolerance(BACKWARD))


def test_a_module_outside_ddp_lengthens_backward_not_exposed_communication(study, plain):
    done = study(2, "--model", "timed:outside_backward_ms=100", *QUICK[2:])
    parts, reference = done.level("dp2")["breakdown_ms"], plain.level("dp2")["breakdown_ms"]
    assert parts["backward"] - reference["backward"] == pytest.approx(100, abs=tolerance(100))
    exposed = sum(parts[p] for p in EXPOSED) - sum(reference[p] for p in EXPOSED)
    assert exposed < 30


@pytest.mark.parametrize(
    ("part", "where"), [("data", "data"), ("forward", "forward"), ("optimizer", "optimizer")]
)
def test_a_delay_is_found_in_its_part(study, plain, part, where):
    # One thread, as in the reference: idle OpenMP threads would spin on the other cores.
    done = study(1, *QUICK, "--threads-per-rank", "1", "--plant", f"part={part},ms=50")
    parts, reference = done.level("dp1")["breakdown_ms"], plain.level("dp1")["breakdown_ms"]
    for name in parts:
        expected = 50 if name == where else 0
        assert parts[name] - reference[name] == pytest.approx(expected, abs=tolerance(50)), name
