"""Prints what a script finds around it, and trains with loader workers that are spawned.

    surroundings.py WORKERS [FILE]

Leaves lines in FILE without closing it.
"""

import atexit
import inspect
import os
import pickle
import sys
from pathlib import Path

import sibling
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


class Data:
    """A data set whose class the workers have to find again."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((3,), float(index))


def at_exit():
    print("at exit:", type(pickle.loads(pickle.dumps(Data()))).__name__, flush=True)


def child_exits():
    """A forked child ends by itself, with a code of its own."""
    child = os.fork()
    if not child:
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    atexit.register(at_exit)
    # Before threads of gloo are there, which a forked child would wait for.
    print(child_exits(), Path(__file__).is_absolute(), type(__loader__).__name__, flush=True)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    workers = int(sys.argv[1])
    context = "spawn" if workers else None
    loader = DataLoader(Data(), batch_size=2, num_workers=workers, multiprocessing_context=context)
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    here = (__name__, Path(__file__).name, sys.argv, sys.modules["__main__"].__name__)
    os.chdir("/")
    print(Path(__file__).exists(), len(inspect.getsource(main).splitlines()))
    print(here, Path(sys.path[0]).resolve(), sibling.WORD, model.module.weight.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        left_open = open(sys.argv[2], "w")
        left_open.write("a line\n")
    main()
