"""The table of relays: their names, where they are, which of them `auto` may choose. The choice itself: `choosing`.

A new relay NAME has this place:

1. one folder, ``stage_runtime/relays/NAME/``: a subclass of `abstract.AbstractRelay` in ``relay.py``. It imports from
   outside what it needs, modules beside this one, and nothing of another relay's folder;
2. one line in `RELAYS`, at the place where it is to be preferred.

The rest follows from the line: processes open it and announce its facts in Hello, the contract suite
(``tests/relays/test_relay_contract.py``) and ``benchmarks/relays.py`` run over it, import-linter keeps its folder apart
from the others. Only where it applies:

- packages that it imports: an extra in ``pyproject.toml``, named in its line;
- a new name for `relayBackend`: the contract's ``types/relays.py``, then ``make crds``;
- what only this relay promises: ``tests/relays/test_NAME.py``.

Nothing of a relay is imported before it is opened, and this module imports none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from stage_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from stage_runtime.relays.base import Relay
    from stage_runtime.relays.choice.choosing import Need
    from stage_runtime.relays.context import RelayContext


class RelayFactory(Protocol):
    """A line's factory: it makes the relay of a process."""

    def __call__(self, context: RelayContext) -> Relay: ...


class RelayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One relay."""

    factory: str  #: ``module:name`` of its `RelayFactory`.
    extra: str | None = None  #: The extra of omnipipeline that installs what the relay imports.
    #: Every process opens it, and `auto` may choose it. False: opened only where a pipeline asks for it by name.
    auto: bool = True
    #: Hardware that the machine must have for `auto` to open it, and that the way to a peer must use for `auto` to
    #: choose it.
    needs: Need | None = None
    #: Its `put` takes packs that lie on a GPU in part (`Pack.on_device`); others get them copied to the host.
    sends_from_gpus: bool = False
    #: It connects ranks: where a pipeline lays out a world, only processes of it (`choosing.share_world`).
    ranks: bool = False


#: Best first: `auto` takes the first that reaches a peer.
RELAYS: Final[Mapping[str, RelayEntry]] = {
    "cuda_ipc": RelayEntry(
        factory="stage_runtime.relays.cuda_ipc.relay:CudaIpcRelay", extra="runtime", needs="gpu", sends_from_gpus=True
    ),
    "shm": RelayEntry(factory="stage_runtime.relays.shm.relay:ShmRelay"),
    "nixl": RelayEntry(factory="stage_runtime.relays.nixl.relay:NixlRelay", extra="nixl", needs="rdma"),
    "mooncake": RelayEntry(factory="stage_runtime.relays.mooncake.relay:MooncakeRelay", extra="mooncake", needs="rdma"),
    "nccl": RelayEntry(factory="stage_runtime.relays.nccl.relay:NcclRelay", auto=False, ranks=True),
    "tcp": RelayEntry(factory="stage_runtime.relays.tcp.relay:TcpRelay"),
}


def to_open(
    named: Collection[str],
    table: Mapping[str, RelayEntry] = RELAYS,
    *,
    has: Callable[[Need], bool] = lambda need: False,
) -> tuple[str, ...]:
    """The relays of a process whose pipeline asks for those names, best first. has: what the machine has."""
    return tuple(
        name
        for name, entry in table.items()
        if name in named or (entry.auto and (entry.needs is None or has(entry.needs)))
    )


def load(name: str, table: Mapping[str, RelayEntry] = RELAYS) -> RelayFactory:
    """The factory of a relay; imports its folder.

    Raises: ConfigurationError: no relay has that name, or what it needs is not installed.
    """
    entry = table.get(name)
    if entry is None:
        raise ConfigurationError(f"relay {name!r} is not in this version: use auto, {' or '.join(table)}")
    module, _, attribute = entry.factory.partition(":")
    try:
        factory: RelayFactory = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        install = f"pip install 'omnipipeline[{entry.extra or 'runtime'}]'"
        raise ConfigurationError(f"relay {name!r} cannot be loaded ({error}): {install}") from error
    return factory
