"""The limits of one HTTP connection, and how many a server may have. Used by the rest of `listening`."""

from __future__ import annotations

from typing import Final

import msgspec

from stage_runtime.sockets.endpoints.limits import RAISE_DESCRIPTORS

LEAST: Final = 16  # connections, however few descriptors there are
MOST: Final = 16_384  # connections; an idle stream takes about 30 KiB (`benchmarks/scale.py`)
FEW: Final = 0.25  # of the most connections: those at rest then leave enough room for others


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one client's connection."""

    head_nbytes: int = 64 << 10  #: Proxies' cookies and tokens are within 16 KiB; envoy refuses more than 60.
    head_count: int = 128  #: Headers of one request.
    framing_nbytes: int = 1 << 20  #: Bytes of a chunked body: sizes, extensions and trailers, beside the body itself.
    head_s: float = 15.0  #: Seconds from the connection, or a head's first byte, to the head's end.
    #: Seconds between two requests. Longer than any balancer keeps a connection, or it sends a request on one that is
    #: closed meanwhile: Google's keep theirs for 600 s, Traefik 90 s, nginx and ALB 60 s.
    idle_s: float = 620.0
    crowded_idle_s: float = 75.0  #: The same, while more than `FEW` of all possible connections are open.
    #: Seconds for the rest of a body whose request is answered; clients see the answer meanwhile.
    discard_s: float = 5.0
    write_s: float = 60.0  #: Seconds in which a client that has bytes to read must take ``write_nbytes``.
    write_nbytes: int = 16 << 10
    unread_nbytes: int = 512 << 20  #: Bytes of answers that clients have not taken, all together.
    unread_s: float = 5.0  #: A client that is given more than fits has so long before it may be cut off for that.
    pipelined: int = 16  #: Requests that wait behind the one that is answered; about 6 KiB each.
    connections: int = 0  #: Connections at once; 0: half of the descriptors that the process may have, at most `MOST`.
    sweep_s: float = 1.0


class ConnectionLimit:
    """How many connections a server may have at once. One object for all of its connections."""

    def __init__(self, limits: ConnectionLimits, descriptors: int) -> None:
        """descriptors: how many the process may open."""
        self._limits = limits
        self.logged = False
        self.renew(descriptors)

    def renew(self, descriptors: int) -> None:
        """The process may open so many descriptors by now."""
        most = self._limits.connections or max(LEAST, min(MOST, descriptors // 2))
        self.most = most
        self.reason = f"{most} connections are open"  #: The message to a client that is refused.
        self.advice = "more coordinators take more"  #: The log line for operators.
        if not self._limits.connections and most == descriptors // 2 < MOST:
            self.reason += f": half of the {descriptors} descriptors that the process may open (RLIMIT_NOFILE)"
            self.advice = RAISE_DESCRIPTORS
