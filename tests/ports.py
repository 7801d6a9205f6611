"""TCP ports for processes that are told theirs."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_HIGHEST: Final = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_DRAW: Final = random.SystemRandom()  # test processes side by side draw others
_given: set[int] = set()


def free_port() -> int:
    """One that nobody listens at, below those that the kernel gives to clients: none of these takes it meanwhile."""
    while True:
        port = _DRAW.randrange(10_000, _HIGHEST)
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        _given.add(port)
        return port
