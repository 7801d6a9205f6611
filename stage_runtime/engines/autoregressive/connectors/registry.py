"""The table of KV connectors: where prompts' keys and values come from or go to, and which stages ask for that.

Called by `stage.factory`, by `stage.thread_engine`, and by `process.served` in engine processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from stage_runtime.api import Autoregressive
from stage_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
    from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
    from stage_runtime.engines.autoregressive.core.kv_connector import Notice, Post
    from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
    from stage_runtime.kv_transfer.interface import KVRooms, Source


class Built(Protocol):
    """The parts of a loaded engine, which does not run yet."""

    @property
    def core(self) -> EngineCore: ...
    @property
    def runner(self) -> ModelRunner: ...
    @property
    def weights(self) -> str: ...


class Around(NamedTuple):
    """The surroundings of an engine: its thread and the stage's process. post: has a function called on its thread."""

    post: Post
    role: str = ""  #: The role of its stage, with ``disaggregation``: ``prefill`` or ``decode``.
    rooms: KVRooms | None = None  #: Only with a role, as the rest.
    source: Callable[[EngineCoreRequest], Source | None] = lambda request: None  #: See `DecodeConnector`.
    notice: Notice = lambda event, name, **metadata: None  #: Records an event of the profiler.
    progress: Callable[[str], None] = lambda text: None


class ConnectorModule(Protocol):
    """The functions of a connector's module."""

    def check(self, spec: Autoregressive, role: str) -> None:
        """Raises: ConfigurationError: its settings are wrong, or do not go together. Called for every stage."""

    def connect(self, spec: Autoregressive, loaded: Built, around: Around) -> None:
        """Make the connector and give it to ``loaded.core``. Raises: ConfigurationError: it cannot be used here."""


class ConnectorEntry(NamedTuple):
    """module: imported when a stage is made. wanted: whether a stage with these settings and this role asks for it."""

    module: str
    wanted: Callable[[Autoregressive, str], bool]

    def load(self) -> ConnectorModule:
        module: Any = importlib.import_module(self.module)
        return module  # type: ignore[no-any-return]


#: A stage has at most one: `check` refuses settings that ask for two.
CONNECTORS: Final[Mapping[str, ConnectorEntry]] = {
    "disaggregation": ConnectorEntry(
        "stage_runtime.engines.autoregressive.connectors.pairing", wanted=lambda spec, role: bool(role)
    ),
    "kv_folder": ConnectorEntry(
        "stage_runtime.engines.autoregressive.connectors.folder", wanted=lambda spec, role: bool(spec.kv_folder)
    ),
}


def check(spec: Autoregressive, role: str, table: Mapping[str, ConnectorEntry] = CONNECTORS) -> None:
    """Raises: ConfigurationError: the settings of a connector are wrong, or ask for two connectors."""
    for entry in table.values():
        entry.load().check(spec, role)
    asked = [name for name, entry in table.items() if entry.wanted(spec, role)]
    if len(asked) > 1:
        raise ConfigurationError(f"omni.Autoregressive: {', '.join(asked)}: blocks come from one of them")


def crosses(spec: Autoregressive, role: str) -> bool:
    """Whether blocks leave or enter the engine, so that the weights' digest must be known."""
    return any(entry.wanted(spec, role) for entry in CONNECTORS.values())


def connect(spec: Autoregressive, loaded: Built, around: Around) -> None:
    """Make the connector that the stage asks for, if it asks for one.

    Raises: ConfigurationError: the connector cannot be used, or the model's blocks cannot cross.
    """
    for entry in CONNECTORS.values():
        if entry.wanted(spec, around.role):
            return entry.load().connect(spec, loaded, around)
