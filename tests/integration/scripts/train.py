"""Trains small models as people's scripts do; it knows nothing of a profiler.

Each CASE given trains a model of its own, one after the other, and prints its losses and the
digest of its final weights.
"""

import contextlib
import hashlib
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 12
MICRO_BATCH = 4


class Unused(nn.Module):
    """Has a layer that no loss depends on; takes a dictionary."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, batch):
        return self.used(batch["x"])


class Tied(nn.Module):
    """Uses a layer's weight twice, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.one, self.two, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.last(self.two(self.one(self.frozen(x)).relu()))


class Pair(nn.Module):
    """Takes a tuple."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, pair):
        x, scale = pair
        return self.inner(x) * scale


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def loader(samples=MICRO_BATCH * STEPS):
    """Batches of MICRO_BATCH for each rank; one epoch is ``samples`` a rank."""
    generator = torch.Generator().manual_seed(1)
    count = samples * dist.get_world_size()
    x = torch.randn(count, 16, generator=generator)
    y = torch.randint(0, 4, (count,), generator=generator)
    data = TensorDataset(x, y)
    return DataLoader(data, batch_size=MICRO_BATCH, sampler=DistributedSampler(data))


def forever(batches):
    while True:
        yield from batches


def loss_of(output, y):
    return nn.functional.cross_entropy(output, y)


def simple_loop(model, call=lambda model, x: model(x), after=lambda step: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = forever(loader())
    losses = []
    for step in range(STEPS):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = loss_of(call(model, x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return model, losses


def plain():
    return simple_loop(DDP(mlp()))


def accumulation():
    """Windows of 2 micro-steps; 7 of them an epoch, so that every fourth window is short."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, steps = [], 0
    while steps < STEPS:
        batches = list(loader(7 * MICRO_BATCH))
        for number, (x, y) in enumerate(loader(7 * MICRO_BATCH)):
            ends = number % 2 == 1 or number == len(batches) - 1
            with contextlib.nullcontext() if ends else model.no_sync():
                loss = loss_of(model(x), y) / 2
                loss.backward()
            losses.append(loss.item())
            if ends:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return model, losses


def buffers():
    return simple_loop(DDP(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))))


def evaluation():
    """Evaluates after step 4 and saves after step 7."""
    model = DDP(mlp())

    def after(step):
        if step == 4:
            model.eval()
            with torch.no_grad():
                for x, _ in loader(2 * MICRO_BATCH):
                    model(x)
            model.train()
        if step == 7:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), Path(folder) / "model.pt")

    return simple_loop(model, after=after)


def compiled_module():
    return simple_loop(DDP(torch.compile(mlp(), backend="eager")))


def compiled_ddp():
    return simple_loop(torch.compile(DDP(mlp()), backend="eager"))


def hook():
    model = DDP(mlp())
    model.register_comm_hook(None, fp16_compress_hook)
    return simple_loop(model)


def unused():
    model = DDP(Unused(), find_unused_parameters=True)
    return simple_loop(model, call=lambda model, x: model({"x": x}))


def static_graph():
    model = DDP(Pair(), gradient_as_bucket_view=True, static_graph=True)
    return simple_loop(model, call=lambda model, x: model((x, torch.tensor(0.5))))


def scaler():
    """Autocast with a scaler that skips the optimizer's step 5."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = torch.amp.GradScaler("cpu", init_scale=256.0)
    batches, losses = forever(loader()), []
    for step in range(STEPS):
        x, y = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(x), y)
        scales.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
        scales.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scales.step(optimizer)
        scales.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scales.get_scale() == 128.0
    return model, losses


def two_models():
    first, second = DDP(mlp()), DDP(nn.Linear(4, 4))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (first, second)]
    batches, losses = forever(loader()), []
    for _ in range(STEPS):
        x, y = next(batches)
        loss = loss_of(second(first(x)), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return nn.ModuleList([first, second]), losses


def powersgd():
    """Compresses gradients of rank 1 after two steps; all in one bucket."""
    model = DDP(mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return simple_loop(model)


def bf16():
    def call(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    return simple_loop(DDP(mlp()), call)


def clip_value():
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, losses = forever(loader()), []
    for _ in range(STEPS):
        x, y = next(batches)
        loss = loss_of(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return model, losses


def always_synced():
    """Accumulates two micro-steps without no_sync."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, losses = forever(loader()), []
    for _ in range(STEPS):
        for _ in range(2):
            x, y = next(batches)
            loss = loss_of(model(x), y) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def epochs():
    """Three epochs of four steps, each shuffled anew, with a smaller rate after each."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    batches, losses = loader(4 * MICRO_BATCH), []
    for epoch in range(3):
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return model, losses


def bucket_view():
    return simple_loop(DDP(mlp(), gradient_as_bucket_view=True))


def closure():
    model = DDP(mlp())
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=2, tolerance_change=0, tolerance_grad=0
    )
    batches, losses = forever(loader()), []
    for _ in range(STEPS):
        x, y = next(batches)

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(again)
    return model, losses


def tied():
    return simple_loop(DDP(Tied()))


def uneven():
    """Ranks have 12, 11, 10 ... batches each."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, losses = list(loader())[: STEPS - dist.get_rank()], []
    with model.join():
        for x, y in batches:
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


CASES = {
    f.__name__: f
    for f in (
        plain,
        accumulation,
        buffers,
        evaluation,
        compiled_module,
        compiled_ddp,
        hook,
        unused,
        static_graph,
        scaler,
        two_models,
        powersgd,
        bf16,
        clip_value,
        always_synced,
        epochs,
        bucket_view,
        closure,
        tied,
        uneven,
    )
}


def digest(model):
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def main(names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        torch.manual_seed(0)
        model, losses = CASES[name]()
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, (digest(model), losses))
        if dist.get_rank() == 0:
            print(name, digests, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
