"""The batch proof's pure parts: checksum, comparison of gradients, names of factors."""

import collections
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_profiler.measure import flops, isolation, proof
from ddp_profiler.measure.batches import concatenate
from ddp_profiler.measure.gradients import checksum, compare_gradients, name_factor
from ddp_profiler.schema import LevelSettings
from ddp_profiler.workload import build

CPU = torch.device("cpu")


def level(dp=1, accumulation=1, micro_batch=1):
    return LevelSettings("level", dp, micro_batch, accumulation, "packed", tuple(range(dp)))


def gradients(seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(40, 30, generator=generator) * scale,
        "b": torch.randn(7, generator=generator) * scale * 0.01,
    }


@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.uint8]),
    size=st.integers(1, 50),
    data=st.data(),
)
def test_checksum_sees_every_single_bit(dtype, size, data):
    values = torch.randint(0, 256, (size * torch.empty(0, dtype=dtype).element_size(),))
    values = values.to(torch.uint8)
    place = data.draw(st.integers(0, len(values) - 1))
    bit = data.draw(st.integers(0, 7))
    other = values.clone()
    other[place] ^= 1 << bit
    assert checksum(values.view(dtype)) == checksum(values.clone().view(dtype))
    assert checksum(values.view(dtype)) != checksum(other.view(dtype))
    assert -(2**63) <= checksum(values.view(dtype)) < 2**63


def test_checksum_sees_order_sign_of_zero_and_absence():
    values = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(values) != checksum(values.flip(0))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.zeros(3)) != checksum(None)
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
    # Equal sums of plain bits.
    assert checksum(torch.tensor([1, 3])) != checksum(torch.tensor([2, 2]))


def test_checksum_does_not_depend_on_pieces_or_strides(monkeypatch):
    values = torch.randn(33, 5)
    whole = checksum(values)
    assert checksum(values.t().contiguous().t()) == whole
    assert checksum(values.to_sparse()) == whole
    monkeypatch.setattr("ddp_profiler.measure.gradients._CHUNK", 7)
    assert checksum(values) == whole
    assert checksum(torch.randn(3, dtype=torch.complex64)) != checksum(torch.zeros(3))


@pytest.mark.parametrize(
    ("settings", "factor", "name"),
    [
        ((4, 3, 5), 4, "dp"),
        ((4, 3, 5), 3.002, "accumulation"),
        ((4, 3, 5), 12, "dp x accumulation"),
        ((4, 3, 5), 5, "micro-batch"),
        ((4, 3, 5), 60, "global batch"),
        ((4, 3, 5), 20, "dp x micro-batch"),
        ((4, 3, 5), 1 / 4, "1/dp"),
        ((4, 3, 5), 1 / 12, "1/(dp x accumulation)"),
        ((4, 3, 5), 1 / 60, "1/(global batch)"),
        ((4, 3, 5), 3.01, None),
        ((4, 3, 5), 7, None),
        ((4, 3, 5), -4, None),
        ((4, 3, 5), 0, None),
        ((2, 2, 5), 2, "dp or accumulation"),
        ((2, 2, 5), 1 / 2, "1/dp or 1/accumulation"),
        ((2, 2, 4), 4, "micro-batch or dp x accumulation"),
        # What is 1 is in no product.
        ((2, 1, 1), 2, "dp"),
        ((2, 1, 8), 16, "global batch"),
        ((2, 3, 1), 6, "dp x accumulation"),
        ((1, 1, 1), 2, None),
    ],
)
def test_factor_names(settings, factor, name):
    assert name_factor(factor, level(*settings)) == name


def test_equal_gradients():
    found = compare_gradients(gradients(), gradients(), level(2))
    assert found.max_rel_error == 0
    assert found.factor == pytest.approx(1)
    assert (found.factor_name, found.notes, found.ranks_agree) == (None, (), None)


def test_error_is_of_the_worst_tensor_by_its_largest_value():
    reference = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.1, 0.2])}
    found = compare_gradients(
        {"a": torch.tensor([1.0, -4.0004]), "b": torch.tensor([0.10004, 0.2])}, reference, level()
    )
    assert found.worst_tensor == "b"
    assert found.max_rel_error == pytest.approx(0.00004 / 0.2, rel=1e-3)


def test_factor_is_found_and_named():
    found = compare_gradients(gradients(scale=3.0), gradients(), level(2, 3))
    assert found.factor == pytest.approx(3, rel=1e-6)
    assert found.factor_name == "accumulation"
    assert found.max_rel_error == pytest.approx(2, rel=1e-5)
    assert found.notes == ()


def test_factor_without_a_name():
    found = compare_gradients(gradients(scale=5.0), gradients(), level(2, 3))
    assert found.factor == pytest.approx(5, rel=1e-6)
    assert found.factor_name is None
    assert found.notes == ("The factor between the gradients is no product of the settings.",)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_what_a_factor_does_not_explain_has_no_name(scale):
    other = gradients(scale=scale)
    other["b"] = other["b"].flip(0)
    found = compare_gradients(other, gradients(), level(2))
    assert found.factor == pytest.approx(scale, rel=1e-3)
    assert found.factor_name is None
    assert found.worst_tensor == "b"
    assert found.notes[0].startswith("The gradients differ by more than rounding")
    assert compare_gradients(other, gradients(), level(2), must_be_equal=False).notes == ()


def test_zeros_and_missing_gradients():
    zero = {"a": torch.zeros(3), "b": None, "c": None}
    found = compare_gradients({"a": torch.full((3,), 0.5), "b": None, "c": None}, zero, level())
    assert (found.max_rel_error, found.worst_tensor, found.factor) == (0.5, "a", None)
    # A tensor of zeros beside others: its error is absolute.
    reference = {"a": torch.zeros(3), "b": torch.full((2,), 100.0)}
    found = compare_gradients({"a": torch.full((3,), 0.5), "b": reference["b"]}, reference, level())
    assert (found.max_rel_error, found.worst_tensor) == (0.5, "a")
    found = compare_gradients({"a": None, "b": reference["b"]}, reference, level())
    assert (found.max_rel_error, found.factor) == (0, 1)
    assert compare_gradients({}, {}, level()).max_rel_error == 0


def test_rounding_is_compared_with_the_largest_gradient():
    reference = {"weight": torch.ones(3), "bias": torch.tensor([1e-9])}
    found = compare_gradients({**reference, "bias": torch.tensor([-1e-9])}, reference, level())
    assert found.max_rel_error == pytest.approx(2e-9)
    assert len(found.notes) == 1
    assert "bias" in found.notes[0]


def test_not_finite():
    broken = {**gradients(), "b": torch.tensor([1.0] * 6 + [float("inf")])}
    found = compare_gradients(broken, gradients(), level())
    assert (found.max_rel_error, found.factor, found.worst_tensor) == (None, None, "b")
    assert found.notes == ("The level's gradient of b is not finite.",)
    found = compare_gradients(gradients(), broken, level())
    assert found.notes == ("The one process's gradient of b is not finite.",)


def test_fewer_digits_allow_more_rounding():
    rounded = {name: (g * 2).bfloat16() for name, g in gradients().items()}
    exact = {name: g.bfloat16() * 2.01 for name, g in gradients().items()}
    assert compare_gradients(exact, exact, level(2)).factor == pytest.approx(1)
    found = compare_gradients(
        rounded, {name: g.bfloat16() for name, g in gradients().items()}, level(2)
    )
    assert found.factor_name == "dp"


Pair = collections.namedtuple("Pair", "x y")


def test_concatenate():
    one, two = torch.ones(1, 2), torch.zeros(2, 2)
    assert torch.equal(concatenate([one, two]), torch.cat([one, two]))
    nested = concatenate([{"p": Pair(one, [one]), "n": 3}, {"p": Pair(two, [two]), "n": 3}])
    assert nested["n"] == 3
    assert isinstance(nested["p"], Pair)
    assert torch.equal(nested["p"].y[0], torch.cat([one, two]))
    assert concatenate([("a", "b"), ("c",)]) == ["a", "b", "c"]
    assert concatenate([torch.tensor(2.0), torch.tensor(2.0)]) == 2
    with pytest.raises(ValueError, match="that hold a int cannot be concatenated"):
        concatenate([1, 2])


def test_state_is_kept_whatever_a_model_does():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    module.register_buffer("seen", torch.zeros(1))
    seen = module.seen
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()

    def train_and_fail():
        with isolation.state_kept([module], CPU):
            assert all(p.grad is None for p in module.parameters())
            module(torch.randn(8, 4)).sum().backward()
            module.seen = module.seen + 1
            raise KeyError

    with pytest.raises(KeyError):
        train_and_fail()
    assert module.seen is seen
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert module.training


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda: nn.BatchNorm1d(2), "BatchNorm in training mode"),
        (lambda: nn.BatchNorm1d(2).eval(), None),
        (lambda: nn.BatchNorm1d(2, track_running_stats=False).eval(), "BatchNorm in training"),
        (lambda: nn.InstanceNorm1d(2), None),
        (lambda: nn.SyncBatchNorm(2), "Synchronised BatchNorm"),
        (lambda: nn.Dropout(0.1), "Dropout modules are active"),
        (lambda: nn.Dropout(0.0), None),
        (lambda: nn.Dropout(0.1).eval(), None),
        (lambda: nn.MultiheadAttention(4, 2, dropout=0.1), "Dropout modules are active"),
        (lambda: nn.LayerNorm(2), None),
    ],
)
def test_caveats(make, note):
    notes = proof.caveats([nn.Sequential(make())], level(2, 2))
    assert [n.startswith(note) for n in notes] == ([True] if note else [])
    assert proof.caveats([nn.Sequential(make())], level()) == []
    if note == "Synchronised BatchNorm":
        assert proof.caveats([nn.Sequential(make())], level(2, 1)) == []


def test_fp32_is_fp32_inside_and_settings_come_back():
    torch.set_float32_matmul_precision("medium")
    before = [setting.fp32_precision for setting in isolation._PRECISIONS]
    try:
        with torch.autocast("cpu", torch.bfloat16):
            with isolation.full_precision(CPU):
                assert {setting.fp32_precision for setting in isolation._PRECISIONS} == {"ieee"}
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert [setting.fp32_precision for setting in isolation._PRECISIONS] == before
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_flops_of_the_mlp():
    workload = build("mlp:width=32,depth=2,inputs=16,classes=4", seed=0, micro_batch=8)
    weights = [m.weight.numel() for m in workload.module if isinstance(m, nn.Linear)]
    assert weights == [16 * 32, 32 * 32, 32 * 4]
    # 2 for each weight in forward, for its gradient, and for its input's, which the first lacks.
    expected = 6 * sum(weights) - 2 * weights[0]
    assert flops.count_flops(workload, CPU) == expected
    assert flops.count_flops(workload, CPU, samples=5) == expected


def test_flops_of_a_language_model_with_attention():
    options = "layers=1,width=16,heads=2,context=8,vocab=32"
    workload = build(f"gpt-tiny:{options}", seed=0, micro_batch=8)
    # Weights of the products: attention 4 w^2, feed-forward 8 w^2, output layer w x vocab.
    products = 6 * 8 * (12 * 16 * 16 + 16 * 32)
    # Scores and their use: 2 products of 8 x 8 x 16, three times.
    assert flops.count_flops(workload, CPU) == products + 6 * 2 * 8 * 8 * 16


def test_flops_leave_the_model_as_it_was():
    workload = build("convnet:width=4", seed=0, micro_batch=8)
    before = {name: value.clone() for name, value in workload.module.state_dict().items()}
    random = torch.get_rng_state()
    assert flops.count_flops(workload, CPU) > 0
    after = workload.module.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert all(p.grad is None for p in workload.module.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_flops_are_none_where_none_are_counted():
    spec = "timed:layers=2,forward_ms=0,backward_ms=0,parameters=100,outside_backward_ms=0.01"
    assert flops.count_flops(build(spec, seed=0, micro_batch=8), CPU) is None
    # Batch norm refuses a single sample of one value per channel.
    workload = build("mlp:width=8,depth=1,inputs=4", seed=0, micro_batch=8)
    workload.module.insert(1, nn.BatchNorm1d(8))
    assert flops.count_flops(workload, CPU, samples=1) is None
    assert flops.count_flops(workload, CPU) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_is_a_rate(dtype):
    peak = flops.measure_peak_flops(CPU, dtype, seconds=0.0)
    assert math.isfinite(peak)
    assert peak > 0


@pytest.mark.parametrize(
    "times", [[9.0, 5.0, 2.0, 4.0], [9.0, 2.0, 5.0, 4.0], [9.0, 5.0, 4.0, 2.0]]
)
def test_peak_is_the_best_repetition(monkeypatch, times):
    left = iter(times)
    monkeypatch.setattr(flops, "_cpu_size", lambda dtype: 64)
    monkeypatch.setattr(flops, "_cpu_product", lambda a, b, out: next(left))
    assert flops.measure_peak_flops(CPU, torch.float32, seconds=0.0) == 2 * 64**3 / 2.0


def test_first_product_does_not_count(monkeypatch):
    left = iter([1.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(flops, "_cpu_size", lambda dtype: 64)
    monkeypatch.setattr(flops, "_cpu_product", lambda a, b, out: next(left))
    assert flops.measure_peak_flops(CPU, torch.float32, seconds=0.0) == 2 * 64**3 / 2.0


@pytest.mark.parametrize("rate", [1e8, 3e10, 1e13])
def test_product_on_the_cpu_takes_long_enough_to_be_timed(monkeypatch, rate):
    seconds = {}

    def product(a, b, out):
        # The first product of a size is slow: threads start, memory is new.
        first = len(a) not in seconds
        seconds[len(a)] = 2 * len(a) ** 3 / rate
        return 1.0 if first else seconds[len(a)]

    monkeypatch.setattr(flops, "_cpu_product", product)
    n = flops._cpu_size(torch.float32)
    assert n % 64 == 0
    assert n == flops._CPU_LARGEST or 0.02 < 2 * n**3 / rate < 0.05
