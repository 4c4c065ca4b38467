"""Compiles inside of DDP, with its graph split at the buckets or not, or DDP itself."""

import sys

from loop import DDP, mlp, run, torch, train

SIZE = 256


def main(way):
    module = mlp(24)
    if way == "right":
        # Dynamo splits what it compiles inside of DDP's forward at the buckets,
        model = DDP(module, bucket_cap_mb=1.5)
        call = torch.compile(model, backend="aot_eager")
    else:
        if way == "in_place":
            module.compile(backend="aot_eager")
        else:
            module = torch.compile(module, backend="aot_eager")
        if way != "split":
            # and keeps what it had compiled before as it was: one node of autograd.
            module(torch.randn(SIZE, 256)).sum().backward()
            module.zero_grad()
        model = call = DDP(module, bucket_cap_mb=1.5)
    train(call, [torch.optim.SGD(model.parameters(), lr=0.1)], size=SIZE)


run(main, sys.argv[1])
