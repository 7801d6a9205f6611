"""An abort received by a coordinator that does not own the request: where it is forwarded, and its outcome.

Coordinators have no connections to each other; in a roll the stages, which know them all, forward it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def owners(asker: str, coordinators: Collection[str]) -> tuple[str, ...]:
    """The coordinators that a stage forwards an abort to: every other live one, whether or not it knows the request.

    A request in transit between two stages, or one that waits for an instance, is at no stage.
    """
    return tuple(sorted(one for one in coordinators if one != asker))


class Inquiry:
    """One forwarded abort, until it is answered. ``outcome`` None: answers are missing."""

    def __init__(self, instances: Iterable[str]) -> None:
        self._open: dict[str, int | None] = dict.fromkeys(instances)  #: instance -> answers that it still owes
        self.outcome: bool | None = None if self._open else False

    def answered(self, instance: str, *, aborted: bool, owners: int) -> None:
        """``instance`` returns one owner's answer; it forwarded the abort to ``owners`` of them (0: no
        other one exists).
        """
        if self.outcome is not None or instance not in self._open:
            return
        known = self._open[instance]
        owed = (owners if known is None else known) - 1
        self._open[instance] = owed
        if aborted:
            self.outcome = True
        elif owed <= 0:
            self.gone(instance)

    def gone(self, instance: str) -> None:
        """The instance is gone: expect no answer from it."""
        self._open.pop(instance, None)
        if self.outcome is None and not self._open:
            self.outcome = False
