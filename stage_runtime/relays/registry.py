"""The table of relays. A new relay is one folder beside this file and one line in `BACKENDS`."""

from __future__ import annotations

import importlib
from typing import Final, Protocol

from stage_runtime.errors import ConfigurationError
from stage_runtime.relays.base import Relay
from stage_runtime.relays.context import RelayContext

#: Backend -> (where it is, the extra that brings what it needs).
BACKENDS: Final[dict[str, tuple[str, str | None]]] = {
    "shm": ("stage_runtime.relays.shm.relay:ShmRelay", None),
    "tcp": ("stage_runtime.relays.tcp.relay:TcpRelay", None),
}
#: Backends that a pipeline may ask for by name and this version has not.
PLANNED: Final = frozenset(["nixl", "mooncake", "nccl"])
AUTO: Final = ("shm", "tcp")  # the first that reaches a peer


class Backend(Protocol):
    """What `BACKENDS` names: how a relay is made."""

    def __call__(self, context: RelayContext) -> Relay: ...


def backend(name: str) -> Backend:
    """The constructor of a backend.

    Raises: ConfigurationError: there is none of that name, or what it needs is not installed.
    """
    if name in PLANNED:
        raise ConfigurationError(f"relay {name!r} is not in this version: use auto, {' or '.join(BACKENDS)}")
    if name not in BACKENDS:
        raise ConfigurationError(f"unknown relay {name!r}: wanted auto, {', '.join(BACKENDS)}")
    where, extra = BACKENDS[name]
    module, _, attribute = where.partition(":")
    try:
        found: Backend = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        hint = f"pip install 'omnipipeline[{extra}]'" if extra else "install omnipipeline[runtime]"
        raise ConfigurationError(f"relay {name!r} cannot be loaded ({error}): {hint}") from error
    return found
