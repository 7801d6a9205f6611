"""The choices of one process: per peer the relays that reach it, what has failed since, and what is used.

Made from `choosing`'s rules and kept until the peer is forgotten, so a put costs one look into a dict. Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable

import msgspec

from stage_runtime.errors import RelayRefused, TransferError
from stage_runtime.relays.base import Peer
from stage_runtime.relays.choice import choosing
from stage_runtime.relays.choice.choosing import ProcessFacts, Reached, RelayChoice

log = logging.getLogger(__name__)


class _Known(msgspec.Struct):
    """A peer whose facts are known."""

    facts: ProcessFacts
    reached: tuple[Reached, ...]
    choices: dict[str, RelayChoice]  #: Choices by the relay that is wanted.


class Choices:
    """The relay selections of one process, by peer."""

    def __init__(self, own: ProcessFacts, *, allow_tcp: bool = True) -> None:
        self._own = own
        self._allow_tcp = allow_tcp
        self._peers: dict[Peer, _Known] = {}
        self._lock = threading.Lock()
        #: Failovers by relay: peers to which it has failed and another one took over.
        self.failovers: Counter[str] = Counter()

    def known(self, peer: Peer) -> tuple[str, ...] | None:
        """The relays that reach it, best first; None: its facts are not known."""
        found = self._peers.get(peer)
        return tuple(each.relay for each in found.reached) if found is not None else None

    def open(self, peer: Peer, facts: ProcessFacts, reached: Iterable[Reached]) -> None:
        known = _Known(msgspec.structs.replace(facts, incarnation=str(peer)), tuple(reached), {})
        with self._lock:
            self._peers[peer] = known
        ways = ", ".join(f"{each.relay} ({each.medium})" for each in known.reached)
        log.debug("relays to %s: %s", peer, ways or "none")

    def forget(self, peer: Peer) -> None:
        with self._lock:
            self._peers.pop(peer, None)

    def choose(self, peer: Peer, wanted: str) -> RelayChoice:
        """The relay for what is sent there.

        Raises: RelayRefused: none that is allowed. TransferError: nothing is known of that peer.
        """
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"no relay reaches {peer}")
        choice = known.choices.get(wanted)
        if choice is None:
            choice = choosing.choose(wanted, known.reached, own=self._own, peer=known.facts, allow_tcp=self._allow_tcp)
            known.choices[wanted] = choice
            if wanted not in ("auto", choice.relay) and choice.instead_of is None:
                log.info("relay %s does not reach %s: using %s", wanted, peer, choice.relay)
        return choice

    def fail(self, peer: Peer, relay: str, reason: str) -> bool:
        """``relay`` does not reach ``peer``: use the next one. False: that was known, or the peer is not, or nothing is
        left to use: then this one is tried again.
        """
        with self._lock:
            known = self._peers.get(peer)
            used = [each for each in known.reached if each.relay == relay and each.failed is None] if known else []
            if known is None or not used:
                return False
            reached = tuple(
                msgspec.structs.replace(each, failed=reason) if each.relay == relay else each for each in known.reached
            )
            try:
                choosing.choose("auto", reached, own=self._own, peer=known.facts, allow_tcp=self._allow_tcp)
            except RelayRefused:
                log.warning("relay %s to %s failed: %s; no other one reaches it", relay, peer, reason)
                return False
            self._peers[peer] = _Known(known.facts, reached, {})
        return True

    def count(self, peer: Peer, relay: str, reason: str) -> None:
        """Count and log a failure, once it is known that the peer lives: the relay failed, not the peer."""
        if peer not in self._peers:
            return
        self.failovers[relay] += 1
        log.warning("relay %s to %s failed: %s; using %s", relay, peer, reason, self.choose(peer, relay).relay)
