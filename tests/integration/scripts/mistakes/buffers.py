"""Broadcasts buffers that never change; or, rightly, those of batch norm, or a late change."""

import sys

from loop import DDP, mlp, nn, run, torch, train


class Positions(nn.Module):
    """Adds a table of positions, most of which these short inputs do not need."""

    def __init__(self, changes_at=None):
        super().__init__()
        self.inner = mlp()
        self.calls, self.changes_at = 0, changes_at
        self.register_buffer("table", torch.randn(4096, 256))

    def forward(self, x):
        if self.calls == self.changes_at:
            self.table.neg_()
        self.calls += 1
        return self.inner(x + self.table[: len(x)])


def main(way):
    if way == "norm":
        model = DDP(nn.Sequential(mlp(), nn.BatchNorm1d(256)))
    elif way == "late":
        # In a measured step, long after the warm-up.
        model = DDP(Positions(changes_at=7))
    else:
        model = DDP(Positions(), broadcast_buffers=way == "wrong")
    train(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


run(main, sys.argv[1])
