"""torchrun for one machine that nobody else can reach: ``python -m ddp_profiler.loopback``.

``torchrun --standalone`` meets on ``localhost``, but the store it opens for that listens on all
interfaces, and whoever connects may read and write it. A launch of ours is of one machine, so its
store listens on the loopback interface only. Everything else is torchrun's, arguments included.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore as _Store  # type: ignore[attr-defined]
from torch.distributed import run
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

LOOPBACK = "127.0.0.1"


class _LoopbackStore(_Store):
    """A store whose server, if this process has it, listens on the loopback interface."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *more: Any,
        **options: Any,
    ) -> None:
        if is_master and options.get("master_listen_fd") is None:
            listener = socket.create_server((LOOPBACK, port), backlog=1024)
            host_name, port = LOOPBACK, listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, *more, **options)


def main(arguments: list[str] | None = None) -> None:
    """Runs torchrun on this machine alone; arguments are torchrun's."""
    # The store that nodes meet in, and the one of the ranks, which the agent opens for them.
    c10d_rendezvous_backend.TCPStore = _LoopbackStore  # type: ignore[attr-defined]
    dist.TCPStore = _LoopbackStore  # type: ignore[attr-defined]
    given = sys.argv[1:] if arguments is None else arguments
    run.main(["--standalone", f"--local-addr={LOOPBACK}", *given])


if __name__ == "__main__":
    main()
