"""Fingerprints of a value's tensors, to detect later writes into them. ``--debug-values`` uses them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from stage_runtime.payloads import checking, tensors
from stage_runtime.payloads.isolating import Isolation


class Fingerprint(msgspec.Struct):
    """The tensors and arrays of a value, by path, and a hash of what each held at the last look."""

    parts: dict[str, Any]
    digests: dict[str, str]

    def written(self) -> list[str]:
        """The paths whose memory has changed since the last look."""
        now = {path: _digest(part) for path, part in self.parts.items()}
        changed = [path for path, digest in now.items() if digest != self.digests[path]]
        self.digests = now
        return changed


def fingerprint(value: Any, *, where: str = "payload.data") -> Fingerprint:
    """A fingerprint of all tensors and arrays in ``value`` as they are now. The debug mode uses it."""
    walk = _FlatParts(where)
    walk.run(value, where)
    return Fingerprint(walk.parts, {path: _digest(part) for path, part in walk.parts.items()})


class _FlatParts(Isolation):
    """Collects tensors and arrays."""

    walkers = dict(Isolation.walkers)
    __slots__ = ("parts", "where")

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.parts: dict[str, Any] = {}

    def tensor(self, value: Any) -> Any:
        self.parts[checking.path_of(self.where, self.trail)] = value
        return value

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        return self.tensor(value)


def _digest(part: Any) -> str:
    data, _ = tensors.array_bytes(part) if isinstance(part, np.ndarray) else tensors.tensor_bytes(part)
    return hashlib.blake2b(data, digest_size=16).hexdigest()
