"""The LoRA adapters that an instance has loaded or dropped since its start, as it reports them to coordinators.

Pure. Here: the record of one process, within bounds that fit a message. Not here: what coordinators make of the reports
(`coordinator.questions.adapters`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stage_runtime.wire.parts import ADAPTER_NAME, PATH_LIMIT

# The operations of `omni.Autoregressive`.
LOAD: Final = "load_adapter"
UNLOAD: Final = "unload_adapter"
LIST: Final = "list_adapters"
MOST_CHANGES: Final = 256  # of a stage; the oldest is forgotten
MOST_BYTES: Final = 256 << 10  # of all names and paths of a process: a quarter of the largest frame
_NAME: Final = re.compile(ADAPTER_NAME)


class AdapterRecord:
    """The changes of one process's stages. It runs on one thread."""

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        #: Stage -> adapter -> the folder from which it was loaded; None: it was dropped. Oldest first.
        self._changes: dict[str, dict[str, str | None]] = {}

    def done(self, stage: str, operation: str, arguments: Mapping[str, Any]) -> bool:
        """An engine has carried out an operation. Returns: whether the record is another one now."""
        name, path = arguments.get("name"), arguments.get("path")
        if operation not in (LOAD, UNLOAD) or not isinstance(name, str) or _NAME.fullmatch(name) is None:
            return False
        if operation == LOAD and not (isinstance(path, str) and len(path) <= PATH_LIMIT):
            return False
        changes = self._changes.setdefault(stage, {})
        changes.pop(name, None)
        changes[name] = path if operation == LOAD else None
        while len(changes) > MOST_CHANGES or (sum(self._sizes()) > self._most_bytes and len(changes) > 1):
            del changes[next(iter(changes))]
        return True

    def report(self) -> dict[str, dict[str, str | None]]:
        """The changes by stage, oldest first."""
        return {stage: dict(changes) for stage, changes in self._changes.items()}

    def _sizes(self) -> Iterator[int]:
        for changes in self._changes.values():
            for name, path in changes.items():
                yield len(name) + len((path or "").encode(errors="replace"))
