"""Children that another writer changes back as often as the operator corrects them, and how long to leave them so.

Here: counting corrections. Not here: making them (`writing`), how they are reported (`reporting`). Called by
`reconciling`. A second operator of the same namespaces, or a tool that manages a child, answers each write at once: two
writers would otherwise go on for ever, at the rate of the work queue, and neither would say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from omnipipeline_operator.cluster.store import PipelineKey
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import Manifest, key_of

log = logging.getLogger(__name__)

FREE: Final = 5  # corrections in a row at once: somebody edits by hand
FIRST_S: Final = 1.0  # until the next one, then twice as long each time
MOST_S: Final = 60.0
CALM_S: Final = 300.0  # without a correction: the other writer is gone


class _Contest(msgspec.Struct, kw_only=True):
    """The corrections of one child to one manifest."""

    stamp: str  #: The hash of the manifest.
    count: int = 1
    at: float  #: The last one.

    @property
    def wait_s(self) -> float:
        """The least time between the last one and the next."""
        doubled: float = FIRST_S * 2.0 ** min(self.count - FREE, 10)
        return min(doubled, MOST_S) if self.count >= FREE else 0.0


class Contests:
    """The contested children of all pipelines. A restart of the operator forgets them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[PipelineKey, dict[str, _Contest]] = {}

    def may_correct(self, pipeline: PipelineKey, manifest: Manifest) -> bool:
        """Whether to write this stamped manifest over a live child that differs now."""
        contest = self._of.get(pipeline, {}).get(_name(manifest))
        return contest is None or not self._lasts(contest, manifest) or self._clock() - contest.at >= contest.wait_s

    def corrected(self, pipeline: PipelineKey, manifest: Manifest) -> None:
        """Count a correction that was written: one that is refused is not another writer's."""
        now, name, contests = self._clock(), _name(manifest), self._of.setdefault(pipeline, {})
        contest = contests.get(name)
        if contest is None or not self._lasts(contest, manifest):
            contests[name] = _Contest(stamp=_stamp(manifest), at=now)
            return
        contest.count, contest.at = contest.count + 1, now
        if contest.count == FREE:
            log.warning("%s/%s: %s", *pipeline, _remark([name]))

    def remark(self, pipeline: PipelineKey) -> str | None:
        """The remark of the status about children that are contested now; None: none is."""
        names = [name for name, contest in self._contested(pipeline).items()]
        return _remark(names) if names else None

    def again_s(self, pipeline: PipelineKey) -> float | None:
        """When to look at contested children again, for no watch may report them."""
        now = self._clock()
        waits = [max(one.at + one.wait_s - now, FIRST_S) for one in self._contested(pipeline).values()]
        return min(waits, default=None)

    def forget(self, pipeline: PipelineKey) -> None:
        """The pipeline has been deleted."""
        self._of.pop(pipeline, None)

    def _contested(self, pipeline: PipelineKey) -> dict[str, _Contest]:
        known = self._of.get(pipeline, {})
        return {name: one for name, one in known.items() if one.count >= FREE and self._is_recent(one)}

    def _lasts(self, contest: _Contest, manifest: Manifest) -> bool:
        """Whether it is still about this manifest: no edit of the spec has changed it, and no calm has ended it."""
        return contest.stamp == _stamp(manifest) and self._is_recent(contest)

    def _is_recent(self, contest: _Contest) -> bool:
        return 0 <= self._clock() - contest.at < CALM_S


def _name(manifest: Manifest) -> str:
    return f"{key_of(manifest)} {manifest['metadata']['name']}"


def _stamp(manifest: Manifest) -> str:
    return str(manifest["metadata"]["annotations"][naming.APPLIED])


def _remark(names: list[str]) -> str:
    is_or_are = "is" if len(names) == 1 else "are"
    return (
        f"{', '.join(sorted(names))} {is_or_are} changed back by another writer again and again: a second operator "
        "that watches this namespace, or a tool that manages what this operator makes"
    )
