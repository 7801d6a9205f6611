"""The debug mode for values (OMNI_DEBUG_VALUES=1): which stage writes into memory that it shares?

Two rules, and who breaks which is certain: what a stage gave it does not write again, and what it received is
read-only. So that the two cannot be confused, a stage gets copies in this mode, from a sibling as from afar: its own
memory is watched for writes of the giver, the copies for writes of the receiver. The same on every transport.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

import msgspec

from stage_runtime.payloads import fingerprints, isolating
from stage_runtime.payloads.fingerprints import Fingerprint
from stage_runtime.stage.inputs.arrivals import Sealed
from stage_runtime.wire.values import detached

log = logging.getLogger(__name__)

#: How much of what a stage gave, and received of one request, is remembered: a buffer is used again soon, or never.
REMEMBERED: Final = 16
REQUESTS: Final = 1024  # the end of an aborted one is not reported


class Violation(msgspec.Struct, frozen=True):
    """One write where there must be none."""

    stage: str
    request: str
    path: str
    #: The stage that the value came from; None: the writer itself gave it.
    source: str | None

    def __str__(self) -> str:
        if self.source is None:
            rule = "after it sent it: another stage may share the memory; send a new tensor each time, or a clone"
        else:
            rule = f"which it got from {self.source!r}: it is read-only; use payload.detach()"
        return f"stage {self.stage!r} wrote into {self.path}, {rule}"


class CheckedPayload:
    """`arrivals.Sealed` from another process."""

    def __init__(
        self, sealed: Sealed, mutation_check: MutationCheck, stage: str, source: str, request: str, name: str
    ) -> None:
        """name: what a violation calls it, ``payload`` or ``chunk``."""
        self._sealed = sealed
        self._took = (stage, source, request)
        self._mutation_check = mutation_check
        self._name = name

    def open(self) -> Any:
        self._sealed.copy_out()  # what is remembered must hold no slot of the sender
        fields = self._sealed.open()
        if isinstance(fields, dict):
            for name in ("data", "metadata"):
                self._mutation_check.took(*self._took, fields.get(name), f"{self._name}.{name}")
        return fields

    def copy_out(self) -> None:
        self._sealed.copy_out()

    def discard(self) -> None:
        self._sealed.discard()


class MutationCheck:
    """All values that the stages of this process give and receive. Costs a copy of each, and a hash at every look."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.violations: list[Violation] = []
        self._remembered = remembered
        self._given: dict[str, deque[tuple[str, Fingerprint]]] = {}  #: stage -> (request, what it gave), oldest first
        #: (request, stage) -> (source, what it received), oldest first
        self._taken: OrderedDict[tuple[str, str], deque[tuple[str, Fingerprint]]] = OrderedDict()
        self._lock = Lock()

    def passed(self, source: str, target: str, request: str, value: Any, where: str) -> Any:
        """``value``, isolated, on its way to a sibling stage: a copy."""
        copy = isolating.isolate(detached(value))
        self.took(target, source, request, copy, where)
        return copy

    def took(self, stage: str, source: str, request: str, value: Any, where: str) -> None:
        """``stage`` gets ``value``, in memory of its own."""
        fingerprint = fingerprints.fingerprint(value, where=where)
        if not fingerprint.parts:
            return
        with self._lock:
            taken = self._taken.setdefault((request, stage), deque())
            taken.append((source, fingerprint))
            if len(taken) > self._remembered:
                self._look(stage, request, *taken.popleft())
            if len(self._taken) > REQUESTS:
                self._taken.popitem(last=False)

    def gave(self, stage: str, request: str, values: Mapping[str, Any]) -> None:
        """``stage`` has given these values, by their names in a violation."""
        found = [fingerprints.fingerprint(value, where=where) for where, value in values.items()]
        with self._lock:
            given = self._given.setdefault(stage, deque(maxlen=self._remembered))
            self._look_back(given, stage)
            given.extend((request, fingerprint) for fingerprint in found if fingerprint.parts)

    def began(self, stage: str) -> None:
        """``stage`` begins something: it has written those values which it gave before and which differ now."""
        with self._lock:
            self._look_back(self._given.get(stage, ()), stage)

    def ended(self, stage: str, request: str) -> None:
        """``stage`` has finished a request: it has written those values which it received and which differ now."""
        with self._lock:
            for source, fingerprint in self._taken.pop((request, stage), ()):
                self._look(stage, request, source, fingerprint)
            for giver, given in self._given.items():
                self._look_back(given, giver)

    def forget(self, request: str) -> None:
        """It was aborted, perhaps before its stages began: what they received of it need not be kept."""
        with self._lock:
            for key in [key for key in self._taken if key[0] == request]:
                del self._taken[key]

    def _look_back(self, given: Any, stage: str) -> None:
        for request, fingerprint in given:
            self._look(stage, request, None, fingerprint)

    def _look(self, stage: str, request: str, source: str | None, fingerprint: Fingerprint) -> None:
        for path in fingerprint.written():
            violation = Violation(stage, request, path, source)
            self.violations.append(violation)
            log.error("%s (request %s)", violation, request)
