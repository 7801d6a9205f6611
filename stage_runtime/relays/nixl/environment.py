"""What UCX reads from the environment, set before NIXL is loaded. A variable that is set already is left as it is."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

SIOCGIFADDR: Final = 0x8915
INTERFACE_NAME_NBYTES: Final = 16

#: Measured on TCP: the defaults make a READ four times slower, and a broken link is noticed after 18 s.
TUNED: Final = {
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_TCP_SNDBUF": "4m",
    "UCX_TCP_RCVBUF": "4m",
    "UCX_TCP_USER_TIMEOUT": "10s",  # the kernel counts a full receive window, too: with 3 s a slow peer was dead
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_KEEPALIVE_INTERVAL": "2s",
    "UCX_ERROR_SIGNALS": "",  # the process's own handlers of fatal signals stay
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "fatal",  # a peer's death is reported by this relay
}
#: Without RDMA. The module ib brings a second libnl, whose destructor ends the interpreter with a segmentation fault.
ONLY_TCP: Final = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}


def prepare(bind: str, advertise_host: str | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set. bind, advertise_host: as in `RelaySettings`: their interface is the one that UCX uses, which
    would else divide what it sends among all that it finds.
    """
    wanted = dict(TUNED)
    if not has_rdma():
        wanted |= ONLY_TCP
        interface = "lo" if not bind.startswith("tcp://") else _interface(advertise_host or _host(bind))
        if interface is not None:
            wanted["UCX_NET_DEVICES"] = interface
    for name, value in wanted.items():
        environment.setdefault(name, value)


def has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return devices.is_dir() and any(devices.iterdir())


def _host(bind: str) -> str:
    return bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _interface(host: str) -> str | None:
    """The network interface with the address ``host``; None when there is none, or no IPv4 address is meant."""
    try:
        wanted = socket.gethostbyname(host)
    except OSError:
        return None
    if wanted.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[: INTERFACE_NAME_NBYTES - 1])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == wanted:
                return name
    return None
