"""Replays many small trainings in one launch; rank 0 prints a JSON line per case.

Run by test_replay.py: torchrun --nproc_per_node=N replay_cases.py FOLDER
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.leave import leave
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.attachment import Attachment
from ddp_profiler.measure.scripts.kept_step import KeptStep
from ddp_profiler.measure.scripts.replay import Replay
from ddp_profiler.record import paths
from ddp_profiler.schema import Variant

sys.path.insert(0, str(Path(__file__).parent / "scripts" / "mistakes"))
import gradient_scale
import oracle

STEP = 3


class Samples(IterableDataset):
    """Other samples on every rank; on the last one fewer in a batch, if asked for."""

    def __init__(self, uneven=False):
        self.uneven = uneven

    def __iter__(self):
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = 3 if self.uneven and dist.get_rank() else 4
        while True:
            x = torch.randn(size, 16, generator=generator)
            yield x, torch.randint(0, 4, (size,), generator=generator)


def loader(**keywords):
    return iter(DataLoader(Samples(**keywords), batch_size=None))


def mlp(*inside):
    return nn.Sequential(nn.Linear(16, 8), *inside, nn.Tanh(), nn.Linear(8, 4))


def train(
    module,
    batches,
    *,
    loss=cross_entropy,
    change=lambda x: x,
    hook=None,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    **keywords,
):
    torch.manual_seed(1)
    model = DDP(module, **keywords)
    if hook is not None:
        model.register_comm_hook(None, hook)
    steps = optimizer(model.parameters())
    for _ in range(STEP + 3):
        x, y = next(batches)
        steps.zero_grad()
        loss(model(change(x)), y).backward()
        steps.step()
    return model


def ahead(batches):
    """Gives each batch when it has fetched the next, as Accelerate's loaders do."""
    current = next(batches)
    for following in batches:
        yield current
        current = following


def closures(max_iter):
    def optimizer(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=max_iter, tolerance_change=0)

    torch.manual_seed(1)
    model = DDP(mlp())
    lbfgs = optimizer(model.parameters())
    batches = loader()
    for _ in range(STEP + 3):
        x, y = next(batches)

        def closure(x=x, y=y):
            lbfgs.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        lbfgs.step(closure)
    return model


def two_models():
    torch.manual_seed(1)
    first, second = DDP(mlp()), DDP(nn.Linear(4, 4))
    both = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    batches = loader()
    for _ in range(STEP + 3):
        x, y = next(batches)
        cross_entropy(second(first(x)), y).backward()
        for one in both:
            one.step()
            one.zero_grad()
    return nn.ModuleList([first, second])


def loss_of_two(modules, batches):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return cross_entropy(modules[1](modules[0](x)), y)


def overflow():
    """The scaler skips the step that is compared."""
    torch.manual_seed(1)
    model = DDP(mlp())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    batches = loader()
    for step in range(STEP + 3):
        x, y = next(batches)
        loss = cross_entropy(model(x), y) * (float("inf") if step == STEP else 1.0)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
    return model


def of_words(*words):
    """A training of gradient_scale.py."""
    return lambda: gradient_scale.train(*words, steps=STEP + 3)[0]


def failing(module, batches):
    raise ValueError("planted")


def exiting(module, batches):
    sys.exit(3)


def no_loss(module, batches):
    return torch.ones(2)


class Uncopied(nn.Module):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        raise TypeError("planted: holds a socket")


def scaled(count):
    return lambda output, y: cross_entropy(output, y) * count


class NoGroup(nn.Module):
    """Sums over ranks in forward, by a collective of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        total = torch.ones(1)
        dist.all_reduce(total)
        return self.layer(x)


CASES = {
    "right": of_words("right"),
    "accumulation": of_words("accumulation"),
    "dp": of_words("dp"),
    "both": of_words("both"),
    "sum": of_words("sum"),
    "clip": of_words("right", "clip"),
    "clip scaler": of_words("right", "clip", "scaler"),
    "dp clip scaler": of_words("dp", "clip", "scaler"),
    "dp autocast scaler": of_words("dp", "autocast", "scaler"),
    "autocast": of_words("right", "autocast"),
    "ahead": lambda: train(mlp(), ahead(loader())),
    "changed on the way": lambda: train(mlp(), loader(), change=lambda x: x * 1.0 + 0.0 * x + 1),
    "reshaped": lambda: train(
        nn.Sequential(nn.Flatten(), mlp()), loader(), change=lambda x: x.view(-1, 4, 4)
    ),
    "uneven": lambda: train(mlp(), loader(uneven=True)),
    "uneven dp": lambda: train(mlp(), loader(uneven=True), loss=scaled(2)),
    "batch norm": lambda: train(mlp(nn.BatchNorm1d(8)), loader()),
    "dropout": lambda: train(mlp(nn.Dropout(0.5)), loader()),
    "compiled": lambda: train(torch.compile(mlp(), backend="eager"), loader(), loss=scaled(2)),
    "hook": lambda: train(mlp(), loader(), loss=scaled(2), hook=fp16_compress_hook),
    "views": lambda: train(mlp(), loader(), gradient_as_bucket_view=True, static_graph=True),
    "two models": two_models,
    "closure": lambda: closures(1),
    "closures": lambda: closures(3),
    "no loader": lambda: train(mlp(), iter(Samples())),
    "uncopied": lambda: train(Uncopied(), loader()),
    "own collective": lambda: train(NoGroup(), loader()),
    "raises": lambda: train(mlp(), loader()),
    "exits": lambda: train(mlp(), loader()),
    "no loss": lambda: train(mlp(), loader()),
    "a rank's file is lost": lambda: train(mlp(), loader()),
    "overflow": overflow,
    "incomplete": lambda: train(mlp(), loader()),
}
ORACLES = {
    "two models": loss_of_two,
    "raises": failing,
    "exits": exiting,
    "no loss": no_loss,
    "changed on the way": lambda module, batches: oracle.loss(
        module, [(x + 1, y) for x, y in batches]
    ),
    "reshaped": lambda module, batches: oracle.loss(
        module, [(x.view(-1, 4, 4), y) for x, y in batches]
    ),
}


def digest(model):
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(values).hexdigest()


def observe(case, folder):
    rank, failures = dist.get_rank(), []
    kept = KeptStep(STEP, leads=rank == 0)
    replay = Replay("oracle:loss", ORACLES.get(case, oracle.loss), kept)
    problem = None

    def block(variant):
        nonlocal problem
        if attachment.started and kept.step < attachment.tracker.step and problem is None:
            problem = replay.share(paths.replay_file(folder, rank))

    attachment = Attachment(
        lambda _: Recorder(HostTimeline(), lambda _: None),
        [(Variant.WARMUP, STEP + 1), (Variant.WARMUP, 1)],
        on_failure=failures.append,
        on_block=block,
        kept=kept,
    )
    attachment.install()
    model = CASES[case]()
    attachment.uninstall()
    attachment.let_go()
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if rank:
        return
    if case == "a rank's file is lost":
        paths.replay_file(folder, 1).unlink()
    accumulation = 2 if case == "incomplete" else kept.micro_steps or 1
    state, before = torch.get_rng_state(), digest(model)
    proof = replay.prove(
        accumulation, lambda rank: paths.replay_file(folder, rank), problems.__getitem__
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert digest(model) == before
    assert kept.model is None
    assert kept.share is None
    print(
        json.dumps(
            {"case": case, **dataclasses.asdict(proof), "failures": list(map(str, failures))}
        ),
        flush=True,
    )


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        observe(case, folder)
        # Without it another case's files could be written before they are read.
        dist.barrier()
    dist.destroy_process_group()
    leave(0)  # Torch's own threads could abort the interpreter's end.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
