"""Has DDP look for unused parameters; only one of the ways needs it."""

import sys

from loop import DDP, dist, mlp, nn, run, torch, train


class Sometimes(nn.Module):
    """Leaves a layer out on one of the ranks, in some steps."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = mlp(16), nn.Linear(256, 256)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        out = self.always(x)
        skips = dist.get_rank() == 1 and self.calls % 3 == 0
        return out if skips else self.sometimes(out)


def main(way):
    module = {"needed": Sometimes, "wrong": lambda: mlp(16), "right": lambda: mlp(16)}[way]()
    model = DDP(module, find_unused_parameters=way != "right")
    train(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


run(main, sys.argv[1])
