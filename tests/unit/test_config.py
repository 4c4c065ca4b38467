"""Settings of a study: what is refused, and in which words."""

import dataclasses
import math

import pytest

from ddp_profiler.config import StudyConfig, parse_numbers
from ddp_profiler.errors import EXIT_USAGE, UsageError


def test_defaults_are_valid_and_frozen():
    config = StudyConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"steps": -5}, "--steps -5"),
        ({"warmup": 1}, "--warmup 1 is below 2"),
        ({"micro_batch": 0}, "--micro-batch 0"),
        ({"threads_per_rank": 0}, "--threads-per-rank 0"),
        ({"accumulate": ()}, "--accumulate"),
        ({"accumulate": (1, 0)}, "--accumulate 1,0"),
        ({"accumulate": (2, 2)}, "--accumulate 2,2"),
        ({"dp": (0,)}, "--dp 0"),
        ({"dp": (1, 1)}, "--dp 1,1"),
        ({"bucket_cap_mb": 0.0}, "--bucket-cap-mb 0"),
        ({"bucket_cap_mb": -1.0}, "--bucket-cap-mb -1"),
        ({"timeout_s": 0.0}, "--timeout 0"),
        ({"precision": "fp8"}, "--precision fp8"),
        ({"backend": "mpi"}, "--backend mpi"),
        ({"allreduce_max_mb": 65.0}, "--allreduce-max-mb 65 is above 64"),
        ({"placement": "wide"}, "--placement wide"),
        ({"link_gbps": 0.0}, "--link-gbps 0"),
        ({"kineto": -1}, "--kineto -1"),
        ({"link_gbps": -1.0}, "--link-gbps -1"),
    ],
)
def test_refused(settings, words):
    with pytest.raises(UsageError) as raised:
        StudyConfig(**settings)
    assert words in raised.value.message
    assert raised.value.remedy
    assert "\n" not in raised.value.message
    assert raised.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 1},
        {"warmup": 2},
        {"micro_batch": 1},
        {"threads_per_rank": 1},
        {"accumulate": (4, 1)},
        {"dp": (8, 1)},
        {"bucket_cap_mb": 0.001},
        {"timeout_s": 0.5},
        {"precision": "bf16"},
        {"backend": "gloo"},
        {"placement": "spread"},
        {"link_gbps": 0.001},
        {"kineto": 1},
    ],
)
def test_just_allowed(settings):
    config = StudyConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize("name", ["bucket_cap_mb", "timeout_s", "link_gbps"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_only_finite_numbers(name, value):
    with pytest.raises(UsageError):
        StudyConfig(**{name: value})


def test_numbers():
    assert parse_numbers("--dp", "1") == (1,)
    assert parse_numbers("--dp", "1, 2,16") == (1, 2, 16)


@pytest.mark.parametrize("text", ["", "1,", "two", "1;2", "1.5", "0x2"])
def test_no_numbers(text):
    with pytest.raises(UsageError, match=r"is not a whole number") as raised:
        parse_numbers("--accumulate", text)
    assert raised.value.message.startswith(f"--accumulate {text}:")
