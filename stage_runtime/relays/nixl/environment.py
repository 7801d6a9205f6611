"""The variables that UCX reads from the environment, set before NIXL is loaded. A variable that is set already is left
as it is.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

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
#: The environment without RDMA. The module ib brings a second libnl, whose destructor ends the interpreter with a
#: segmentation fault.
ONLY_TCP: Final = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}
#: The environment with RDMA, where no TCP is allowed: UCX would use it for a device that does not work, without a
#: report.
NO_TCP: Final = {"UCX_TLS": "^tcp"}

Way: TypeAlias = Literal["rdma", "memory", "tcp"]
#: How UCX_TLS names the ways, without what follows a ``_``: all of a way, then its kinds.
TRANSPORTS: Final[Mapping[Way, tuple[frozenset[str], frozenset[str]]]] = {
    "rdma": (frozenset({"ib"}), frozenset({"rc", "ud", "dc"})),
    "memory": (frozenset({"sm", "shm"}), frozenset({"posix", "sysv", "cma", "xpmem", "knem"})),
    "tcp": (frozenset({"tcp"}), frozenset()),
}


def prepare(
    bind: str,
    advertise_host: str | None,
    environment: MutableMapping[str, str] = os.environ,
    *,
    rdma: bool = False,
    allow_tcp: bool = True,
) -> None:
    """Set what is not set. bind, advertise_host: as in `RelaySettings`: their interface is the one that UCX uses, which
    would else divide what it sends among all that it finds. rdma: there are devices.
    """
    wanted = dict(TUNED)
    if rdma and not allow_tcp:
        wanted |= NO_TCP
    elif not rdma:
        wanted |= ONLY_TCP
        interface = "lo" if not bind.startswith("tcp://") else _interface(advertise_host or _host(bind))
        if interface is not None:
            wanted["UCX_NET_DEVICES"] = interface
    for name, value in wanted.items():
        environment.setdefault(name, value)


def used(devices: Collection[str], environment: Mapping[str, str] = os.environ) -> frozenset[Way]:
    """The transports that UCX may send by, as its variables say. devices: the RDMA devices of this process."""
    return frozenset(
        way for way in TRANSPORTS if _named(way, environment) and (way != "rdma" or _reaches(devices, environment))
    )


def _named(way: Way, environment: Mapping[str, str]) -> bool:
    value = environment.get("UCX_TLS", "all").strip()
    names = {name.strip().partition(":")[0].partition("_")[0] for name in value.removeprefix("^").split(",")}
    whole, kinds = TRANSPORTS[way]
    if value.startswith("^"):
        return not (names & whole or (kinds and kinds <= names))
    return bool(names & (whole | kinds | {"all"}))


def _reaches(devices: Collection[str], environment: Mapping[str, str]) -> bool:
    """Whether UCX loads its module for RDMA, and may use one of the devices."""
    modules = environment.get("UCX_MODULES", "all").strip()
    listed = {name.strip() for name in modules.removeprefix("^").split(",")}
    if ("ib" in listed) if modules.startswith("^") else not listed & {"ib", "all"}:
        return False
    allowed = {name.strip().partition(":")[0] for name in environment.get("UCX_NET_DEVICES", "all").split(",")}
    return bool(devices) and ("all" in allowed or not allowed.isdisjoint(devices))


def _host(bind: str) -> str:
    return bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _interface(host: str) -> str | None:
    """The network interface with the address ``host``; None when no interface has it."""
    try:
        wanted = ipaddress.ip_address(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError):
        return None
    if wanted.is_loopback:
        return "lo"
    return _interface6(wanted) if wanted.version == 6 else _interface4(wanted)


def _interface4(wanted: ipaddress.IPv4Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[: INTERFACE_NAME_NBYTES - 1])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if answer[20:24] == wanted.packed:
                return name
    return None


def _interface6(wanted: ipaddress.IPv6Address, table: Path = Path("/proc/net/if_inet6")) -> str | None:
    """``table``: an address in hexadecimal digits, four more columns, and the interface."""
    try:
        lines = table.read_text().splitlines()
    except OSError:  # the kernel has no IPv6
        return None
    return next((line.split()[5] for line in lines if bytes.fromhex(line.split()[0]) == wanted.packed), None)
