"""Compiles inside of DDP, which ends the overlap, or DDP itself."""

import sys

from loop import DDP, mlp, run, torch, train


def main(way):
    layers = 24
    if way == "wrong":
        model = call = DDP(torch.compile(mlp(layers), backend="aot_eager"), bucket_cap_mb=1.5)
    elif way == "child":
        module = mlp(layers)
        module.compile(backend="aot_eager")
        model = call = DDP(module, bucket_cap_mb=1.5)
    else:
        model = DDP(mlp(layers), bucket_cap_mb=1.5)
        call = torch.compile(model, backend="aot_eager")
    train(call, [torch.optim.SGD(model.parameters(), lr=0.1)], size=256)


run(main, sys.argv[1])
