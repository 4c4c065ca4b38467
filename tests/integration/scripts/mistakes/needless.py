"""Accumulates over micro-steps that each reduce gradients, in ways that look right but one."""

import contextlib
import sys

from loop import DDP, STEPS, batches, mlp, run, torch

ACCUMULATION = 4


def main(way):
    model, other = DDP(mlp(12)), DDP(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches()
    for _ in range(STEPS):
        for micro in range(ACCUMULATION):
            x, y = next(data)
            last = micro == ACCUMULATION - 1
            quiet = contextlib.nullcontext if last else model.no_sync
            if way == "right":
                with quiet():
                    torch.nn.functional.mse_loss(model(x), y).backward()
            elif way == "backward_only":
                loss = torch.nn.functional.mse_loss(model(x), y)
                with quiet():
                    loss.backward()
            elif way == "wrong_object":
                with contextlib.nullcontext() if last else other.no_sync():
                    torch.nn.functional.mse_loss(model(x), y).backward()
            else:
                assert way == "never"
                torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


run(main, sys.argv[1])
