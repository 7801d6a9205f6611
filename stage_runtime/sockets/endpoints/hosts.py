"""Hosts to listen at and to announce, in clusters and on machines of either IP family.

Here: one rule for all sockets, of ZeroMQ and of HTTP. Not here: who may connect (`addresses`). Called by the wiring of
all programs; imports little, for PID 1 of a pod.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

ANYWHERE: Final = "*"  #: The name in place of a host to listen at.


def everywhere() -> str:
    """The host to bind for every address of this machine: of both families where the kernel has IPv6.

    One rule for all sockets, of ZeroMQ and of HTTP: a pod's only address may be of either family.
    """
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
    except OSError:
        return "0.0.0.0"
    return "::"


def host(written: str, anywhere: Callable[[], str] = everywhere) -> str:
    """A host to listen at: ``anywhere()`` for `ANYWHERE`, others as they are."""
    return anywhere() if written == ANYWHERE else written


def bracketed(host: str) -> str:
    """A host as a URL or an endpoint has it."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def written_out(endpoint: str, anywhere: Callable[[], str] = everywhere) -> str:
    """A TCP endpoint as libzmq takes it: ``anywhere()`` for `ANYWHERE`, brackets around an IPv6 address.

    Kubernetes puts a pod's address into a variable as it is, of either family. Others come back as they are.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    given, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{bracketed(host(given, anywhere))}:{port}"


def listener(host: str, port: int, *, backlog: int) -> socket.socket:
    """A TCP socket that listens at a host; at ``::`` for both families, which asyncio's own listeners refuse to do.

    Raises: OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((host, port))
        made.listen(backlog)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
