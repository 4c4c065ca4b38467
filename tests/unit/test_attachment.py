"""What an attachment sees of a training loop in this process, and that it leaves nothing behind."""

import contextlib
import copy
import gc
import struct
import threading
import weakref
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.weak import TensorWeakRef

from ddp_profiler.measure import ddp_adapter
from ddp_profiler.measure.clock import DeviceTimeline, HostTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.attachment import Attachment
from ddp_profiler.measure.scripts.digests import Digests
from ddp_profiler.measure.topology import Topology
from ddp_profiler.observe.description import Description
from ddp_profiler.schema import Interruption, SpanKind, Variant

PHASES = (SpanKind.DATA, SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER)


def ours():
    """Names of functions in torch that are the profiler's."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    owners = (DDP, torch.autograd, optimizers.Optimizer, torch.amp.GradScaler, iterator)
    owners += (torch.nn.utils, torch.nn.utils.clip_grad, torch, torch.distributed)
    found = {
        f"{owner.__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if type(value) is FunctionType and "ddp_profiler" in value.__code__.co_filename
    }
    found |= {"pre hook" for _ in optimizers._global_optimizer_pre_hooks}
    return found | {"post hook" for _ in optimizers._global_optimizer_post_hooks}


class Observed:
    """An attachment whose spans are kept as rows."""

    def __init__(
        self, plan=((Variant.INSTRUMENTED, 99),), sink=None, warmup=0, timeline=HostTimeline
    ):
        self.rows = []
        self.failures = []
        self.blocks = []
        self.attachment = Attachment(
            lambda _: Recorder(timeline(), sink or self._take),
            plan,
            warmup=warmup,
            on_failure=self.failures.append,
            on_block=self.blocks.append,
        )

    def _take(self, columns):
        names = list(columns)
        self.rows += [dict(zip(names, v, strict=True)) for v in zip(*columns.values(), strict=True)]

    def finish(self):
        self.attachment.tracker.finish()
        self.attachment.uninstall()
        self.rows.sort(key=lambda row: row["begin_ns"])
        return self

    def phases(self, step=0):
        inside = [r for r in self.rows if r["kind"] in PHASES and r["step"] == step]
        ends = [r["end_ns"] for r in inside]
        # None begins before the one before it has ended.
        assert all(end <= after["begin_ns"] for end, after in zip(ends, inside[1:], strict=False))
        return [SpanKind(r["kind"]).name for r in inside]

    def of(self, kind):
        return [r for r in self.rows if r["kind"] == kind]

    @property
    def steps(self):
        return [(r["index"], r["samples"]) for r in self.of(SpanKind.STEP)]


@pytest.fixture
def observed(process_group):
    made = []

    def make(*args, **keywords):
        made.append(Observed(*args, **keywords))
        made[-1].attachment.install()
        return made[-1]

    yield make
    for one in made:
        one.attachment.uninstall()
    assert ours() == set()
    assert not ddp_adapter.is_installed()


X = torch.ones(6, 3)


def model(**keywords):
    return DDP(nn.Linear(3, 2), **keywords)


def test_plain_loop(observed):
    seen = observed()
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for batch in DataLoader(X, batch_size=2):
        sgd.zero_grad()
        ddp(batch).sum().backward()
        sgd.step()
    seen.finish()
    assert seen.steps == [(1, 2)] * 3
    for step in range(3):
        # The first zero_grad has no step before it that it could end.
        assert seen.phases(step) == ["DATA", "OPTIMIZER", "FORWARD", "BACKWARD", "OPTIMIZER"]
    assert len(seen.of(SpanKind.GRADIENT)) == len(seen.of(SpanKind.LOCAL_BACKWARD_END)) == 3
    assert seen.failures == []


def test_norms_of_gradients_are_taken_in_the_warm_up_only(observed):
    plan = [(Variant.WARMUP, 2), (Variant.PLAIN, 2), (Variant.INSTRUMENTED, 2)]
    seen = observed(plan)
    ddp, expected = model(), []
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(7):
        for micro_step in range(2):
            with ddp.no_sync() if micro_step == 0 else contextlib.nullcontext():
                ddp(X[:2] * (step + 1)).square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in ddp.parameters()])
        expected.append(float(gradients.double().square().sum()))
        sgd.step()
        sgd.zero_grad()
    seen.finish()
    for kind in (SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM):
        points = seen.of(kind)
        assert [(p["step"], p["micro_step"], p["index"]) for p in points] == [(0, 1, 0), (1, 1, 0)]
        found = [struct.unpack("<d", struct.pack("<q", p["value"]))[0] for p in points]
        assert found == pytest.approx(expected[:2], rel=1e-6)
    assert seen.failures == []


@pytest.mark.parametrize("unscales", [False, True])
def test_scaler_with_a_step_that_it_skips(observed, unscales):
    seen = observed()
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(ddp(X).sum() * factor).backward()
        if unscales:
            scaler.unscale_(sgd)
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
    seen.finish()
    assert scaler.get_scale() == 1.0
    assert seen.steps == [(1, 6)] * 3
    # Unscaling, clipping if there is any, the step, and zero_grad: each once.
    count = 4 if unscales else 3
    for step in range(3):
        assert seen.phases(step) == ["FORWARD", "BACKWARD", *count * ["OPTIMIZER"]]


def test_scaler_with_two_optimizers_makes_one_step(observed):
    seen = observed()
    ddp = model()
    both = [torch.optim.SGD([p], lr=0.1) for p in ddp.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        scaler.scale(ddp(X).sum()).backward()
        for one in both:
            scaler.step(one)
        scaler.update()
    seen.finish()
    assert seen.steps == [(1, 6)] * 2


def test_closures(observed):
    # LBFGS calls its closure as often as its losses ask for.
    torch.manual_seed(0)
    seen = observed()
    ddp = model()
    lbfgs = torch.optim.LBFGS(ddp.parameters(), max_iter=3, tolerance_change=0, tolerance_grad=0)

    def closure():
        lbfgs.zero_grad()
        loss = ddp(X).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        lbfgs.step(closure)
    seen.finish()
    calls = len(seen.of(SpanKind.FORWARD)) // 2
    assert calls > 1
    assert seen.steps == [(calls, calls * 6)] * 2
    once = ["OPTIMIZER", "FORWARD", "BACKWARD"]
    # zero_grad of the second closure ends the first step, as at the head of a loop.
    assert seen.phases(0) == [*calls * once, "OPTIMIZER", "OPTIMIZER"]
    assert seen.phases(1) == [*calls * once, "OPTIMIZER"][1:]


def test_evaluation_and_saving(observed, tmp_path):
    seen = observed()
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        if step:
            with torch.inference_mode():
                ddp(X)
            torch.save(ddp.state_dict(), tmp_path / "model.pt")
        ddp(X).sum().backward()
        sgd.step()
    seen.finish()
    interrupted = seen.of(SpanKind.INTERRUPTION)
    assert [(r["step"], r["index"]) for r in interrupted] == [
        (1, Interruption.EVALUATION),
        (1, Interruption.CHECKPOINT),
    ]
    assert seen.steps == [(1, 6)] * 2


def test_evaluation_of_the_module_inside_ddp(observed):
    """As by frameworks: DDP is not called, only the loader tells of it."""
    seen = observed()
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def evaluate(how):
        ddp.module.train(how == "no grad")
        with torch.set_grad_enabled(how != "no grad"):
            for batch in DataLoader(X, batch_size=3):
                ddp.module(batch)
        ddp.module.train()

    batches = iter(DataLoader(torch.ones(24, 3), batch_size=6))
    for step in range(4):
        if step in (1, 3):
            evaluate({1: "eval mode", 3: "no grad"}[step])
        ddp(next(batches)).sum().backward()
        sgd.step()
    seen.finish()
    interrupted = seen.of(SpanKind.INTERRUPTION)
    assert [(r["step"], r["index"]) for r in interrupted] == [
        *2 * [(1, Interruption.EVALUATION)],
        *2 * [(3, Interruption.EVALUATION)],
    ]
    assert len(seen.of(SpanKind.DATA)) == 4 + 2 * 2
    assert seen.steps == [(1, 6)] * 4


@pytest.mark.parametrize("style", ["no_grad", "detach", "separate"])
def test_a_gan_evaluates_nothing(observed, style):
    """What the discriminator is trained on comes from the generator, whose turn is another."""
    torch.manual_seed(0)
    seen = observed()
    generator, discriminator = DDP(nn.Linear(2, 3)), DDP(nn.Linear(3, 1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    for real in DataLoader(X, batch_size=3):
        noise = torch.randn(3, 2)
        of_discriminator.zero_grad()
        discriminator(real).mean().backward()
        if style == "no_grad":
            with torch.no_grad():
                made = generator(noise)
        elif style == "detach":
            made = generator(noise).detach()
        else:
            whole = generator(noise)
            made = whole.detach()
        discriminator(made).mean().neg().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        if style != "separate":
            whole = generator(noise)
        discriminator(whole).mean().backward()
        of_generator.step()
    seen.finish()
    assert seen.failures == []
    assert seen.of(SpanKind.INTERRUPTION) == []
    # A batch from the loader and one from the generator, then the generator's own turn.
    assert seen.steps == [(2, 6), (1, 3)] * 2
    forwards = [(r["step"], r["micro_step"], r["samples"]) for r in seen.of(SpanKind.FORWARD)]
    of_both = [(0, 0, 3), (0, 1, 3), (0, 1, None), (1, 0, 3), (1, 0, None)]
    first = [one for one in forwards if one[0] < 2]
    if style == "no_grad":
        # It comes first, and its samples are not those of the batch that is trained on.
        of_both[1:3] = of_both[2:0:-1]
    if style == "separate":
        del of_both[4]
    assert first == of_both
    assert [facts.number for facts in seen.attachment.facts(rebuilt=True).ddps] == [0, 1]


def test_a_training_mode_that_was_forgotten_does_not_make_training(observed):
    seen = observed()
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, batch in enumerate(DataLoader(X, batch_size=2)):
        ddp(batch).sum().backward()
        sgd.step()
        with torch.no_grad():
            if step == 0:
                for other in DataLoader(X, batch_size=3):
                    ddp(other)
                    ddp(other + 1)
            if step == 1:
                ddp.eval()(X)
                ddp.train()
    seen.finish()
    interrupted = [r["step"] for r in seen.of(SpanKind.INTERRUPTION)]
    # Of each batch the fetch and two calls, and then the call in evaluation mode.
    assert interrupted == [1] * 6 + [2]
    assert [r["samples"] for r in seen.of(SpanKind.FORWARD)] == [2, 2, 2]
    assert seen.steps == [(1, 2)] * 3


def test_training_in_evaluation_mode_is_training(observed):
    seen = observed()
    ddp = model().eval()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for batch in DataLoader(X, batch_size=2):
        sgd.zero_grad()
        ddp(batch).sum().backward()
        sgd.step()
    seen.finish()
    assert seen.steps == [(1, 2)] * 3
    assert seen.of(SpanKind.INTERRUPTION) == []


def test_saving_by_functions_imported_by_name_counts_once(observed, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    by_name = (torch.save, safetensors.save_file)
    seen = observed()
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for save in (by_name[0], by_name[1], torch.save, safetensors.save_file):
        weights = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
        save(weights, str(tmp_path / "model"))
        ddp(X).sum().backward()
        sgd.step()
    seen.finish()
    interrupted = seen.of(SpanKind.INTERRUPTION)
    assert [(r["step"], r["index"]) for r in interrupted] == [
        (step, Interruption.CHECKPOINT) for step in range(4)
    ]


def test_batch_dim_and_inputs(observed):
    class Inputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, *inputs, **named):
            return self.layer(X)

    seen = observed()
    seen.attachment._batch_dim = 1
    ddp = DDP(Inputs())
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wide = torch.ones(2, 5)
    for args, named in (
        ((wide,), {}),
        (({"x": wide},), {}),
        (([(0, wide)],), {}),
        ((), {"x": wide}),
        ((torch.tensor(1.0), wide), {}),
        ((7,), {}),
    ):
        ddp(*args, **named).sum().backward()
        sgd.step()
    seen.finish()
    assert seen.steps == [(1, 5)] * 5 + [(1, None)]


def test_tokens_are_counted_in_plain_steps_too(observed):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Embedding(4, 2)

        def forward(self, ids, attention_mask=None):
            return self.layer(ids)

    seen = observed(plan=[(Variant.INSTRUMENTED, 2), (Variant.PLAIN, 2)])
    ddp = DDP(Words())
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for length in (3, 5, 7, 9):
        for _ in range(2):
            ids = torch.zeros(2, length, dtype=torch.long)
            # One place in each micro-step is padding; by position, as scripts do it.
            mask = torch.ones_like(ids)
            mask[0, 0] = 0
            ddp(ids, mask).sum().backward()
        sgd.step()
    seen.finish()
    assert [r["value"] for r in seen.of(SpanKind.STEP)] == [10, 18, 26, 34]
    assert [(r["value"], r["index"]) for r in seen.of(SpanKind.FORWARD)] == [
        *[(5, 6)] * 2,
        *[(9, 10)] * 2,
    ]


def test_loaders_that_feed_training_are_found(observed):
    seen = observed(plan=[(Variant.WARMUP, 1), (Variant.PLAIN, 9)])
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for batch in DataLoader(X, batch_size=2):
        ddp(batch).sum().backward()
        sgd.step()
        with torch.no_grad():
            for other in DataLoader(X, batch_size=3):
                ddp(other)
    seen.finish()
    feed = seen.attachment.feed
    assert [(v.sampling, v.batch_size, v.batches) for v in feed.loaders] == [("sequential", 2, 3)]
    # Only in warm-up is there time for a digest.
    assert len(feed.digests) == 1
    assert seen.failures == []


def test_nothing_is_left_at_the_end_of_the_plan(observed):
    seen = observed(plan=[(Variant.WARMUP, 1), (Variant.PLAIN, 1), (Variant.INSTRUMENTED, 1)])
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        ddp(X).sum().backward()
        sgd.step()
        # The plan's end is noticed when its last step has ended: with the next act.
        assert (ours() == set()) == (step > 2)
    assert ours() == set()
    assert not ddp_adapter.is_installed()
    assert seen.blocks == [Variant.WARMUP, Variant.PLAIN, Variant.INSTRUMENTED, None]
    assert len(seen.steps) == 3
    variants = {r["variant"] for r in seen.of(SpanKind.FORWARD)}
    assert variants == {Variant.WARMUP, Variant.INSTRUMENTED}
    assert {r["variant"] for r in seen.of(SpanKind.GRADIENT)} == variants


def test_if_something_of_ours_fails_training_goes_on(observed):
    def full(_):
        raise OSError("planted")

    def train():
        torch.manual_seed(0)
        ddp = model()
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(4):
            ddp(X).sum().backward()
            sgd.step()
        return [p.detach().clone() for p in ddp.parameters()]

    expected = train()
    seen = observed(plan=[(Variant.WARMUP, 1), (Variant.INSTRUMENTED, 9)], sink=full)
    weights = train()
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert [str(error) for error in seen.failures] == ["planted"]
    assert ours() == set()


def test_what_fails_while_a_failure_is_told_does_not_reach_the_training(observed):
    """Such as a message that nobody can read any more."""

    def refuse(_):
        raise ValueError("I/O operation on closed file")

    seen = observed(plan=[(Variant.WARMUP, 1), (Variant.INSTRUMENTED, 9)], sink=refuse)
    seen.attachment._on_failure = refuse
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(4):
        ddp(X).sum().backward()
        sgd.step()
    assert ours() == set()


def test_an_evaluation_of_the_module_before_training_feeds_nothing(observed):
    seen = observed(plan=[(Variant.WARMUP, 9)])
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.eval()
    for batch in DataLoader(X, batch_size=3):
        ddp.module(batch)
    ddp.train()
    for batch in DataLoader(X, batch_size=2):
        ddp(batch).sum().backward()
        sgd.step()
    seen.finish()
    feed = seen.attachment.feed
    assert [loader.batch_size for loader in feed.loaders] == [2]
    assert len(feed.digests) == 3
    assert seen.failures == []


def test_errors_of_the_script_pass_through(observed):
    seen = observed()
    ddp = model()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(RuntimeError):
        ddp(torch.ones(2, 7))
    with pytest.raises(RuntimeError):
        torch.ones(1).backward()
    for batch in DataLoader(X, batch_size=6):
        ddp(batch).sum().backward()
        sgd.step()
    seen.finish()
    assert seen.steps == [(1, 6)]
    assert seen.failures == []


def test_copies_and_other_threads_are_left_alone(observed):
    seen = observed()
    ddp = model()
    twin = copy.deepcopy(ddp)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X).sum().backward()
    sgd.step()
    seen.finish()
    assert seen.steps == [(1, 6)]
    assert torch.equal(twin(X), twin.module(X))


def test_reduced_parameters_are_counted_once(observed):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight
            self.frozen = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x):
            return self.two(self.one(self.frozen(x)))

    seen = observed()
    first = DDP(Tied())
    assert list(seen.attachment.reduced()) == ["one.weight", "one.bias", "two.bias"]
    second = model()
    assert list(seen.attachment.reduced()) == [
        "0.one.weight",
        "0.one.bias",
        "0.two.bias",
        "1.weight",
        "1.bias",
    ]
    assert (first, second) == tuple(seen.attachment.ddps)
    seen.attachment.let_go()
    assert seen.attachment.ddps == []


def train(ddp, steps=2):
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        sgd.zero_grad()
        ddp(X).sum().backward()
        sgd.step()


def alive(references):
    gc.collect()
    return [number for number, reference in enumerate(references) if reference() is not None]


@pytest.fixture
def digested(monkeypatch):
    """Has digests taken, as where there are other ranks."""
    monkeypatch.setattr(Digests, "_has_peers", lambda _: True)


def test_models_that_are_deleted_are_freed_at_once(observed, digested):
    """Five trainings in a row, all in the observed steps."""
    plan = [(Variant.WARMUP, 4), (Variant.INSTRUMENTED, 2), (Variant.PLAIN, 9)]
    seen = observed(plan, warmup=4)
    weights, ddps = [], []
    for _ in range(5):
        ddp = model()
        weights += map(TensorWeakRef, ddp.parameters())
        ddps.append(weakref.ref(ddp))
        train(ddp)
        assert ddps[-1]() is not None
        del ddp
        assert (alive(weights), alive(ddps)) == ([], [])
        assert seen.attachment.ddps == []
    seen.finish()
    assert seen.failures == []
    assert len(seen.steps) == 10
    assert len(seen.of(SpanKind.GRADIENT_DIGEST)) == 2 * 2
    assert [facts.ddp for facts in seen.attachment.optimized] == [0, 0, 1, 1]
    # Each has a number of its own, which it keeps.
    assert [r["value"] for r in seen.of(SpanKind.GRADIENT)] == [0, 0, 1, 1, 2, 2]


def test_a_hook_of_the_script_keeps_no_model_alive(observed):
    def doubled(state, bucket):
        work = torch.futures.Future()
        work.set_result(bucket.buffer().mul_(2))
        return work

    seen = observed(plan=[(Variant.WARMUP, 1), (Variant.INSTRUMENTED, 2)])
    ddp = model()
    ddp.register_comm_hook(None, doubled)
    train(ddp, 4)
    reference = weakref.ref(ddp)
    del ddp
    assert alive([reference]) == []
    seen.finish()
    assert len(seen.of(SpanKind.GRADIENT)) == 3
    assert seen.failures == []


def test_a_model_that_is_not_trained_counts_nowhere(observed):
    seen = observed(plan=[(Variant.WARMUP, 2), (Variant.INSTRUMENTED, 99)])
    attachment = seen.attachment
    before = DDP(nn.Linear(30, 20))
    ddp = model()
    # None was called yet, as where all are trained past DDP.
    assert [ddp.number for ddp in attachment.facts(rebuilt=True).ddps] == [0, 1]
    train(ddp, 3)
    with torch.no_grad():
        before.eval()(torch.ones(1, 30))
    facts = attachment.facts(rebuilt=True)
    assert (facts.elements, facts.bucket_bytes) == (8, (32,))
    assert [parameter.name for parameter in facts.reduced] == ["weight", "bias"]
    assert [ddp.number for ddp in facts.ddps] == [1]
    # Gone, it is what it was when the last block began.
    del ddp
    assert attachment.facts(rebuilt=True) == facts
    # So are all of them, and one that was never trained is no substitute.
    del before
    assert attachment.facts(rebuilt=True) == facts
    seen.finish()
    assert {r["value"] for r in seen.of(SpanKind.GRADIENT)} == {1}


class NowAndThen(nn.Module):
    """Changes a buffer in some of its forwards."""

    def __init__(self, every):
        super().__init__()
        self.layer, self.every, self.calls = nn.Linear(3, 2), every, 0
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        self.count += self.calls % self.every == 0
        return self.layer(x)


def test_buffers_are_looked_at_between_blocks_too(observed, digested):
    window = [(Variant.PLAIN, 4), (Variant.INSTRUMENTED, 4), (Variant.INSTRUMENTED, 2)]
    seen = observed([(Variant.WARMUP, 1), (Variant.WARMUP, 1), *window, (None, 3), *window])
    ddp = DDP(NowAndThen(every=8))
    train(ddp, 30)
    seen.finish()
    points = seen.of(SpanKind.BUFFER_DIGEST)
    # The model of a later window is found by its first call.
    steps = [1, 2, 6, 10, 19, 23]
    assert [(r["step"], r["micro_step"], r["index"]) for r in points] == [
        (step, -1, 0) for step in steps
    ]
    assert len({r["value"] for r in points if r["step"] < 8}) == 1
    assert len({r["value"] for r in points}) == 3
    # Each lies in no step.
    spans = [(r["begin_ns"], r["end_ns"]) for r in seen.of(SpanKind.STEP)]
    assert not any(begin < r["begin_ns"] < end for r in points for begin, end in spans)
    assert seen.failures == []


def test_what_was_known_of_a_model_is_no_longer_in_a_later_window(observed):
    window = (Variant.INSTRUMENTED, 2)
    seen = observed(plan=[(Variant.WARMUP, 2), window, (None, 3), window, window])
    train(model(), 5)
    train(DDP(nn.Linear(3, 1)), 5)
    assert seen.attachment.facts(rebuilt=True).elements == 4
    assert [ddp.number for ddp in seen.attachment.facts(rebuilt=True).ddps] == [1]


def test_a_model_is_freed_after_the_window(observed, digested):
    seen = observed([(Variant.WARMUP, 2), (Variant.INSTRUMENTED, 1), (None, 99)], warmup=2)
    ddp = model()
    weights, ddps = [*map(TensorWeakRef, ddp.parameters())], [weakref.ref(ddp)]
    train(ddp, 5)
    assert seen.blocks[-1] is None
    assert seen.attachment.ddps == []
    # Facts that the record refers to stay.
    assert len(seen.attachment.optimized) == 2
    del ddp
    assert (alive(weights), alive(ddps)) == ([], [])
    seen.finish()
    assert len(seen.of(SpanKind.GRADIENT_DIGEST)) == 4


def test_a_model_that_is_built_between_windows_is_met_at_its_first_call(observed):
    window = (Variant.INSTRUMENTED, 2)
    seen = observed([(Variant.WARMUP, 1), window, (None, 4), window, (None, 9)])
    train(model(), 4)
    # What was kept of the first window's model is not taken for another one's.
    assert seen.attachment.facts(rebuilt=True) is None
    other = model()
    assert seen.attachment.ddps == []
    train(other, 3)
    assert seen.attachment.ddps == []
    train(other, 1)
    assert seen.attachment.ddps == [other]
    train(other, 4)
    assert seen.attachment.ddps == []
    reference = weakref.ref(other)
    del other
    assert alive([reference]) == []
    seen.finish()
    assert [r["value"] for r in seen.of(SpanKind.GRADIENT)] == [0, 0, 0, 1, 1]


def test_an_evaluation_with_which_a_later_window_begins(observed):
    window = (Variant.INSTRUMENTED, 2)
    seen = observed([(Variant.WARMUP, 1), window, (None, 2), window])
    ddp = model()
    train(ddp, 5)
    ddp.eval()
    for batch in DataLoader(X, batch_size=3):
        ddp.module(batch)
    ddp.train()
    train(ddp, 3)
    seen.finish()
    interrupted = [(r["step"], r["index"]) for r in seen.of(SpanKind.INTERRUPTION)]
    assert interrupted == [(5, Interruption.EVALUATION)] * 2


class Anchored(DeviceTimeline):
    """A device's timeline without a device, that counts its anchors."""

    anchors = 0

    def __init__(self):
        self._host = HostTimeline()
        self.mark = self._host.mark

    def move_anchor(self):
        Anchored.anchors += 1

    def time_ns(self, mark):
        return self._host.time_ns(mark)

    def release(self, marks):
        pass


def test_a_devices_time_is_anchored_anew_after_a_rest(observed, monkeypatch):
    monkeypatch.setattr(Anchored, "anchors", 0)
    window = (Variant.INSTRUMENTED, 2)
    seen = observed([(Variant.WARMUP, 1), window, (None, 2), window, (None, 3)], timeline=Anchored)
    ddp = model()
    anchors = []
    for _ in range(9):
        train(ddp, 1)
        anchors.append(Anchored.anchors)
    # It is the first act of its first step that begins a window.
    assert anchors == [0] * 5 + [1] * 4
    seen.finish()


def test_a_step_that_has_not_begun_has_no_digest(observed, digested):
    """Some scripts have an optimizer step before anything else."""
    seen = observed([(Variant.WARMUP, 2), (Variant.INSTRUMENTED, 9)], warmup=2)
    ddp = model()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    train(ddp, 3)
    seen.finish()
    assert [r["step"] for r in seen.of(SpanKind.GRADIENT_DIGEST)] == [1, 1]


def test_what_somebody_has_put_around_ours_stays(observed):
    seen = observed()
    original = torch.autograd.backward
    ddp = model()
    ours_there = torch.autograd.backward
    assert ours_there is not original

    def theirs(*args, **keywords):
        return ours_there(*args, **keywords)

    try:
        torch.autograd.backward = theirs
        train(ddp, 1)
        seen.attachment.uninstall()
        assert torch.autograd.backward is theirs
        train(ddp, 1)
    finally:
        torch.autograd.backward = original
    seen.finish()
    assert len(seen.of(SpanKind.BACKWARD)) == 1


def test_nobody_looks_for_other_training_once_there_is_a_model(observed):
    seen = observed()
    initializer = nn.DataParallel.__init__
    plain = nn.Linear(3, 2)
    train(plain, 2)
    train(model(), 3)
    seen.finish()
    assert dict(seen.attachment.elsewhere.steps) == {"SGD": 2}
    assert nn.DataParallel.__init__ is not initializer


def test_an_optimizer_of_another_thread_is_none_of_the_loops(observed, digested):
    seen = observed([(Variant.WARMUP, 2), (Variant.INSTRUMENTED, 9)], warmup=2)
    ddp = model()
    own = nn.Parameter(torch.ones(2))
    aside = torch.optim.SGD([own], lr=0.1)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        ddp(X).sum().backward()
        thread = threading.Thread(target=aside.step)
        thread.start()
        thread.join()
        sgd.step()
    seen.finish()
    assert len(seen.of(SpanKind.OPTIMIZER)) == 3
    assert len(seen.attachment.optimized) == 2
    assert seen.attachment._stepping == []
    assert seen.steps == [(1, 6)] * 3


class Board(dict):
    """What ranks say to each other, here to themselves."""

    publish = dict.__setitem__

    def find(self, name, kind=None):
        return self.get(name)


@pytest.mark.parametrize("gone", [True, False])
def test_what_is_described_after_each_window(observed, digested, gone):
    window = (Variant.INSTRUMENTED, 2)
    seen = observed([(Variant.WARMUP, 2), window, (None, 2), window, (None, 9)], warmup=2)
    description = Description(Topology(0, 0, 1, 1, True), Board(), seen.attachment)
    described = []

    def ends(variant):
        if variant is None:
            description.update(final=True)
            described.append(description.facts)

    seen.attachment._on_block = ends
    one, untrained = model(), model()
    train(one, 5)
    if gone:
        del one
    del untrained
    train(DDP(nn.Linear(3, 1)), 5)
    seen.finish()
    first, second = described
    assert [facts.ddp for facts in first.optimized] == [0, 0, 1, 1]
    assert (first.parameters, first.bucket_bytes) == (8, (32,))
    assert [ddp.number for ddp in first.ddps] == [0]
    # Digests were taken in the warm-up only, of a model that is gone now.
    assert second.optimized == first.optimized
    assert (second.parameters, second.bucket_bytes) == (4, (16,))
    assert [ddp.number for ddp in second.ddps] == [0, 2]
