"""Steps with gradients that were not reduced, or not left alone; and ways that are right."""

import sys

from loop import DDP, batches, dist, mlp, nn, run, torch, train
from torch.distributed.optim import ZeroRedundancyOptimizer


def no_sync():
    """All of training is under no_sync."""
    model = DDP(mlp())
    with model.no_sync():
        train(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def past_ddp(equal=False):
    """The module is called, and not the DDP around it."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.ones(8, 256)
    train(lambda x: model.module(constant if equal else x) * (0.0 if equal else 1.0), [optimizer])


def past_ddp_equal():
    """The same, with gradients that are equal by chance: all of them are 0."""
    past_ddp(equal=True)


def past_one_of_two():
    """Of two models one is called past its DDP."""
    first, second = DDP(mlp(2)), DDP(mlp(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    train(lambda x: second.module(first(x)), optimizers)


def inverted():
    """The last of two micro-steps is under no_sync, not the first."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches()
    for _ in range(14):
        nn.functional.mse_loss(model(next(data)[0]), next(data)[1]).backward()
        with model.no_sync():
            nn.functional.mse_loss(model(next(data)[0]), next(data)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def outside():
    """A head is in no DDP."""
    model, head = DDP(mlp()), nn.Linear(256, 256)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    train(lambda x: head(model(x)), [optimizer])


def frozen():
    """A layer is frozen while DDP is built, and trained nevertheless."""
    module = mlp()
    module[0].requires_grad_(False)
    model = DDP(module)
    module[0].requires_grad_(True)
    train(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def changed():
    """Gradients are scaled after the reduction, by what depends on the rank."""
    model = DDP(mlp())

    def scale():
        model.module[2].weight.grad.mul_(1.0 + dist.get_rank())

    train(model, [torch.optim.SGD(model.parameters(), lr=0.1)], scale)


def right():
    """Clips, has two optimizers, and a parameter of each rank's own that DDP ignores."""
    module = mlp()
    module.register_parameter("own", nn.Parameter(torch.full((256,), 1.0 + dist.get_rank())))
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    model = DDP(module, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (parameters[::2], parameters[1::2])]
    train(
        lambda x: model(x) * module.own,
        optimizers,
        lambda: nn.utils.clip_grad_norm_([p for p in parameters if p is not module.own], 1.0),
    )


def sharded():
    """Each rank's optimizer steps a part of the parameters; a scaler skips a step."""
    model = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    data = batches()
    for step in range(14):
        x, y = next(data)
        loss = nn.functional.mse_loss(model(x), y) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def by_hand():
    """All under no_sync, and the gradients are reduced by hand."""
    model = DDP(mlp())

    def reduce():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad.div_(dist.get_world_size())

    with model.no_sync():
        train(model, [torch.optim.SGD(model.parameters(), lr=0.1)], reduce)


WAYS = (
    no_sync,
    past_ddp,
    past_ddp_equal,
    past_one_of_two,
    inverted,
    outside,
    frozen,
    changed,
    right,
    sharded,
    by_hand,
)

run(lambda way: next(w for w in WAYS if w.__name__ == way)(), sys.argv[1])
