"""What an attachment sees of a training loop in this process, and that it leaves nothing behind."""

import copy
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

from ddp_profiler.measure import ddp_adapter
from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.attachment import Attachment
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

    def __init__(self, plan=((Variant.INSTRUMENTED, 99),), sink=None):
        self.rows = []
        self.failures = []
        self.blocks = []
        self.attachment = Attachment(
            lambda _: Recorder(HostTimeline(), sink or self._take),
            plan,
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
