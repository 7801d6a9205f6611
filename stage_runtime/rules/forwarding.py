"""An abort that came to a coordinator which does not own the request: whom it is passed on to, and what came of it.

Coordinators do not speak to each other; in a roll the stages, which know them all, pass it on. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def owners(asker: str, coordinators: Collection[str]) -> tuple[str, ...]:
    """Whom a stage passes it on to: every other live coordinator, whether the request has been here or not.

    A request that is under way between two stages, or waits for an instance, is at no stage at all.
    """
    return tuple(sorted(one for one in coordinators if one != asker))


class Inquiry:
    """One coordinator's question, until it is answered. ``outcome`` None: some are still to answer."""

    def __init__(self, instances: Iterable[str]) -> None:
        self._open: dict[str, int | None] = dict.fromkeys(instances)  #: instance -> answers that it still owes
        self.outcome: bool | None = None if self._open else False

    def answered(self, instance: str, *, aborted: bool, owners: int) -> None:
        """``instance`` says what one owner said; it asked ``owners`` of them (0: there is no other)."""
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
        """It answers no more."""
        self._open.pop(instance, None)
        if self.outcome is None and not self._open:
            self.outcome = False
