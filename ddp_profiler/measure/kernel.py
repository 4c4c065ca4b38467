"""Names that are equal for processes that share something of one kernel."""

from __future__ import annotations

import socket
from pathlib import Path


def shared(namespace: str) -> str:
    """Returns a name that is equal for processes of one boot in one namespace.

    On Linux that is the boot of the kernel and the namespace; elsewhere the host.

    Args:
        namespace: As ``/proc/self/ns`` names it: ``net`` for a loopback interface, ``time`` for
            a monotonic clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns', namespace).readlink()}"
    except OSError:
        return socket.gethostname()
