"""The choice of the relay that carries what one process sends to another: derived from what both have announced in
Hello.

Pure: facts in, a choice or the reason of a refusal out. `dispatch` opens the relays, collects the facts and remembers
choices; `registry` has the order of preference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from stage_runtime.errors import RelayRefused

#: The medium that carries the bytes. ``memory``: a process of the same machine reads them where they lie. ``unix``: a
#: socket of the machine. ``tcp``: the network's sockets, whichever library writes to them; ``tcp+curve``: encrypted.
Medium: TypeAlias = Literal["gpu", "memory", "rdma", "unix", "tcp", "tcp+curve"]
Need: TypeAlias = Literal["gpu", "rdma"]

NETWORK: Final = frozenset(("tcp", "tcp+curve"))  #: The media that `allowTCP` allows.
PROCESS: Final = "process"  #: The key of `ProcessFacts` among the relays' facts.


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts that a process announces of itself and of where it runs."""

    incarnation: str = ""
    pod: str = ""  #: The pod's uid; empty outside of Kubernetes.
    boot: str = ""  #: The kernel's boot id: equal on the same machine.
    namespaces: dict[str, int] = {}  #: ``pid``, ``ipc``, ``net``, ``mnt``.
    gpus: tuple[str, ...] = ()  #: UUIDs of those in reach of its stages; none when they have none.
    rdma: tuple[str, ...] = ()  #: Devices.
    started: tuple[str, ...] = ()  #: Relays that really started, best first.
    refused: dict[str, str] = {}  #: Relays that were to be opened and did not start -> why.
    rank: int | None = None  #: The rank in the world of ``world_size`` that the pipeline's author laid out.
    world_size: int | None = None
    coordinator: bool = False  #: A pipeline names a relay for its stages; a coordinator uses it where it can.

    def has(self, need: Need) -> bool:
        return bool(self.gpus if need == "gpu" else self.rdma)


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A relay that has opened a way to the peer."""

    relay: str
    medium: Medium
    auto: bool = True  #: `auto` may choose it.
    needs: Need | None = None  #: `auto` chooses it only when the way is this.
    failed: str | None = None  #: Why it is not used any more.


class RelayChoice(msgspec.Struct, frozen=True, kw_only=True):
    relay: str
    medium: Medium
    instead_of: str | None = None  #: The relay that failed.


def process_facts(facts: Mapping[str, Any]) -> ProcessFacts:
    """The facts of a peer, from what it announced; what cannot be read counts as not announced."""
    try:
        return msgspec.convert(facts.get(PROCESS, {}), ProcessFacts)
    except msgspec.ValidationError:
        return ProcessFacts()


def choose(
    wanted: str, reached: Sequence[Reached], *, own: ProcessFacts, peer: ProcessFacts, allow_tcp: bool = True
) -> RelayChoice:
    """The relay for what is sent to ``peer``. reached: those that reach it, best first.

    wanted: ``auto``, or the relay that the pipeline names. That one is used or refused, except to and from a
    coordinator, where it is a preference: large bodies of clients travel there, and ``shm`` never crosses pods.
    The next one follows after a failure of the one that was used, and ``tcp`` is the last.
    allow_tcp: of the pipeline, for its stages: what clients send travels over TCP anyway.
    Raises: RelayRefused: names why each relay is not used.
    """
    allow_tcp = allow_tcp or own.coordinator or peer.coordinator
    usable = [each for each in reached if each.failed is None and (allow_tcp or each.medium not in NETWORK)]
    failed = {each.relay: each.failed for each in reached if each.failed is not None}
    named = next((each for each in usable if each.relay == wanted), None)
    if named is not None:
        return RelayChoice(relay=named.relay, medium=named.medium)
    if wanted == "auto" or wanted in failed or own.coordinator or peer.coordinator:
        best = next((each for each in usable if _of_auto(each)), None)
        if best is not None:
            return RelayChoice(relay=best.relay, medium=best.medium, instead_of=next(iter(failed), None))
    raise RelayRefused(_refusal(wanted, reached, own=own, peer=peer, allow_tcp=allow_tcp))


def _of_auto(reached: Reached) -> bool:
    return reached.auto and (reached.needs is None or reached.needs == reached.medium)


def _refusal(wanted: str, reached: Sequence[Reached], *, own: ProcessFacts, peer: ProcessFacts, allow_tcp: bool) -> str:
    whose = peer.incarnation
    if not reached:
        return f"no relay reaches {whose}"
    if wanted == "auto":
        reasons = [f"{each.relay}: {_why(each, allow_tcp)}" for each in reached]
        return f"no relay to {whose}: {'; '.join(reasons)}"
    found = next((each for each in reached if each.relay == wanted), None)
    if found is not None:
        return f"relayBackend {wanted} to {whose}: {_why(found, allow_tcp)}"
    return f"relayBackend {wanted} does not reach {whose}: {_unreached(wanted, own, peer)}"


def _why(reached: Reached, allow_tcp: bool) -> str:
    if reached.failed is not None:
        return f"it failed ({reached.failed})"
    if reached.medium in NETWORK and not allow_tcp:
        return "it would use TCP, and dataPlane.allowTCP is false"
    if not reached.auto:
        return "auto does not choose it; name it in relayBackend"
    return f"the connection does not use {reached.needs}"


def _unreached(wanted: str, own: ProcessFacts, peer: ProcessFacts) -> str:
    for end, facts in (("here", own), ("there", peer)):
        if wanted in facts.refused:
            return f"it did not start {end} ({facts.refused[wanted]})"
        if wanted not in facts.started:
            return f"it is not open {end}"
    return f"it cannot connect the two ({apart(own, peer)})"


def share_world(own: ProcessFacts, peer: ProcessFacts) -> bool:
    """Whether relays with ranks connect the two: either no world was laid out, or both are ranks of one."""
    if own.world_size is None and peer.world_size is None:
        return True
    return own.world_size == peer.world_size and own.rank != peer.rank


def apart(own: ProcessFacts, peer: ProcessFacts) -> str:
    """The boundary that separates two processes."""
    if own.boot != peer.boot:
        return "another machine"
    if own.pod != peer.pod:
        return "another pod"
    differing = [kind for kind, inode in own.namespaces.items() if peer.namespaces.get(kind) != inode]
    if not share_world(own, peer):
        return f"rank {own.rank} of {own.world_size}, and rank {peer.rank} of {peer.world_size}"
    return f"another {' and '.join(differing)} namespace" if differing else "same machine and namespaces"
