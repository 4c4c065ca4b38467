"""The built-in models: size, learning, repeatability, gradients, and the times of `timed`."""

import copy
import pickle
import re
import time

import pytest
import torch
from torch.utils.data import default_collate

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.workload import BUILTIN_MODELS, build
from ddp_profiler.workload.catalog import CATALOG, DTYPES
from ddp_profiler.workload.gpt import Gpt

SMALL = {
    "gpt-tiny": "gpt-tiny:layers=2,width=32,heads=2,context=16",
    "gpt-small": "gpt-small:layers=1,width=24,heads=2,context=8,vocab=300",
    "mlp": "mlp:width=32,depth=2,inputs=16",
    "convnet": "convnet:width=4",
    "timed": "timed:layers=2,forward_ms=0,backward_ms=0,parameters=100,outside_backward_ms=0.01",
}


def make(spec, seed=1, data=None):
    return build(spec, seed=seed, micro_batch=8, data=data)


def batch_of(workload, first=0, size=8):
    return default_collate([workload.dataset[i] for i in range(first, first + size)])


def parameters_of(workload):
    return [p for m in (workload.module, *workload.extra_modules) for p in m.parameters()]


def gradients(workload, batch):
    parameters = parameters_of(workload)
    loss = workload.loss(workload.module(*workload.inputs(batch)), batch)
    assert loss.shape == ()
    return torch.autograd.grad(loss, parameters)


def number_of_parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_gpt_small_has_gpt2s_size():
    with torch.device("meta"):
        count = number_of_parameters(Gpt(CATALOG["gpt-small"].defaults))
    assert 123e6 < count < 125e6
    assert count == 123_849_984


@pytest.mark.parametrize("name", sorted(set(BUILTIN_MODELS) - {"gpt-small"}))
def test_described_number_of_parameters(name):
    stated = re.search(r"([\d.]+) M parameters", BUILTIN_MODELS[name]).group(1)
    decimals = len(stated.partition(".")[2])
    assert f"{number_of_parameters(make(name).module) / 1e6:.{decimals}f}" == stated


@pytest.mark.parametrize("name", SMALL)
def test_learns(name):
    workload = make(SMALL[name])
    parameters = parameters_of(workload)
    optimizer = workload.optimizer(parameters)
    batch = batch_of(workload)
    losses = []
    for _ in range(8):
        loss = workload.loss(workload.module(*workload.inputs(batch)), batch)
        loss.backward()
        assert all(p.grad is not None for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", SMALL)
def test_same_seed_same_model_and_samples(name):
    def fingerprint(seed):
        torch.rand(seed)  # The global generator must not matter.
        workload = make(SMALL[name], seed)
        samples = batch_of(workload)
        samples = [samples] if isinstance(samples, torch.Tensor) else samples
        return [t.detach().double().flatten() for t in (*parameters_of(workload), *samples)]

    first, again, other = (torch.cat(fingerprint(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    make(SMALL["mlp"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(SMALL) - {"gpt-small"}))
def test_types(name, dtype):
    spec = SMALL[name].replace("width=32", "width=16") + f",dtype={dtype}"
    workload = make(spec)
    wanted = getattr(torch, dtype)
    batch = batch_of(workload, size=2)
    inputs = workload.inputs(batch)
    assert {p.dtype for p in parameters_of(workload)} == {wanted}
    assert {x.dtype for x in inputs if x.is_floating_point()} <= {wanted}
    loss = workload.loss(workload.module(*inputs), batch)
    assert loss.dtype is (torch.float64 if wanted is torch.float64 else torch.float32)
    optimizer = workload.optimizer(parameters_of(workload))
    loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters_of(workload))


@pytest.mark.parametrize("name", ["gpt-tiny", "mlp", "timed"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_mean_of_two_half_batches_gradients_is_the_whole_batchs(name, dtype, tolerance):
    workload = make(f"{SMALL[name]},dtype={dtype}")
    whole = gradients(workload, batch_of(workload, 0, 8))
    first = gradients(workload, batch_of(workload, 0, 4))
    second = gradients(workload, batch_of(workload, 4, 4))
    scale = max(g.abs().max() for g in whole)
    for a, b, c in zip(whole, first, second, strict=True):
        assert (a - (b + c) / 2).abs().max() <= tolerance * scale
    # The halves differ, so that a gradient which is not averaged is noticed.
    assert any((b - c).abs().max() > 1e-3 * scale for b, c in zip(first, second, strict=True))


def test_gpt_sees_no_later_token():
    module = make(SMALL["gpt-tiny"]).module.eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = module(tokens), module(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-6)
    assert not torch.allclose(before[0, 10], after[0, 10], atol=1e-6)


def test_gpt_starts_near_a_uniform_guess():
    workload = make("gpt-tiny")
    batch = batch_of(workload)
    loss = workload.loss(workload.module(*workload.inputs(batch)), batch).item()
    assert loss == pytest.approx(5.545, abs=0.15)  # ln 256


def test_gpt_dropout_acts_in_training_only():
    module = make("gpt-tiny:layers=1,dropout=0.5").module
    tokens = torch.randint(256, (1, 8))
    assert not torch.equal(module(tokens), module(tokens))
    module.eval()
    assert torch.equal(module(tokens), module(tokens))


def test_gpt_record_and_tokens():
    workload = make(SMALL["gpt-tiny"])
    assert workload.name == "gpt-tiny"
    assert workload.tokens_per_sample == 16
    assert workload.options["layers"] == 2
    assert workload.options["dtype"] == "float32"
    assert make(SMALL["mlp"]).tokens_per_sample is None


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-small"])
def test_gpt_on_a_text(name, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 10)
    workload = make(SMALL[name], data=path)
    batch = batch_of(workload)
    context = workload.tokens_per_sample
    assert workload.inputs(batch)[0].shape == (8, context)
    assert bytes(batch[0].tolist()) == path.read_bytes()[: context + 1]
    assert all(g.isfinite().all() for g in gradients(workload, batch))


def test_gpt_refuses_a_text_it_cannot_use(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("short")
    with pytest.raises(InputError, match="has 5 bytes; one sample of context 64 needs 65 bytes"):
        make("gpt-tiny", data=path)
    with pytest.raises(UsageError, match=r"gpt-tiny: vocab=100 is too small for --data"):
        make("gpt-tiny:vocab=100", data=path)


def test_timed_takes_its_times():
    workload = make(
        "timed:layers=4,forward_ms=10,backward_ms=20,outside_backward_ms=40,parameters=1000"
    )
    batch = batch_of(workload)
    forward = backward = encoder = 0.0
    steps = 3
    for _ in range(steps):
        begin = time.perf_counter()
        inputs = workload.inputs(batch)
        encoder_end = time.perf_counter()
        loss = workload.loss(workload.module(*inputs), batch)
        forward_end = time.perf_counter()
        loss.backward()
        encoder += encoder_end - begin
        forward += forward_end - encoder_end
        backward += time.perf_counter() - forward_end
    assert encoder / steps < 0.035
    assert 0.038 < forward / steps < 0.15
    assert 0.115 < backward / steps < 0.35  # 4 x 20 + 40


def test_timed_leaves_the_cores_idle():
    workload = make("timed:layers=4,forward_ms=10,backward_ms=20")
    batch = batch_of(workload)
    gradients(workload, batch)
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(2):
        gradients(workload, batch)
    assert time.process_time() - cpu < 0.25 * (time.perf_counter() - begin)


def test_timed_gradient_is_the_losses_slope():
    workload = make("timed:layers=2,forward_ms=0,backward_ms=0,parameters=40000,dtype=float64")
    batch = batch_of(workload)
    gradient = gradients(workload, batch)[0]
    weight = next(workload.module.parameters())

    def loss_after(shift):
        with torch.no_grad():
            weight[39_999] += shift
            loss = workload.loss(workload.module(*workload.inputs(batch)), batch)
            weight[39_999] -= shift
        return loss

    slope = (loss_after(1e-4) - loss_after(-1e-4)) / 2e-4
    assert gradient[39_999].item() == pytest.approx(slope.item(), rel=1e-5)
    assert gradient.shape == weight.shape
    assert torch.all(gradient == gradient[0])


def test_timed_encoder_is_outside_the_module():
    workload = make(SMALL["timed"])
    (encoder,) = workload.extra_modules
    inside = {id(p) for p in workload.module.parameters()}
    assert all(id(p) not in inside for p in encoder.parameters())
    assert make("timed:layers=1,forward_ms=0,backward_ms=0").extra_modules == ()


def test_timed_buffers():
    assert [b.numel() for b in make("timed:layers=3,buffers=5").module.buffers()] == [5, 5, 5]
    assert list(make("timed").module.buffers()) == []


def test_timed_can_be_copied_and_pickled():
    workload = make(SMALL["timed"])
    batch = batch_of(workload)
    for module in (copy.deepcopy(workload.module), pickle.loads(pickle.dumps(workload.module))):
        assert torch.equal(
            module(*workload.inputs(batch)), workload.module(*workload.inputs(batch))
        )


def test_convnet_has_buffers_to_broadcast():
    assert len(list(make("convnet").module.buffers())) == 18  # 6 batch norms of 3


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", SMALL)
def test_trains_in_ddp(name):
    workload = make(SMALL[name])
    bare = gradients(workload, batch_of(workload))
    ddp = torch.nn.parallel.DistributedDataParallel(workload.module)
    for _ in range(2):  # The second pass fails where a parameter got no gradient.
        ddp.zero_grad()
        batch = batch_of(workload)
        workload.loss(ddp(*workload.inputs(batch)), batch).backward()
    for parameter, gradient in zip(workload.module.parameters(), bare, strict=False):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
