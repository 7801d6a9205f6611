"""The outcomes of the attempts on each pipeline revision, for `/status`, `/metrics` and who judges a new revision.

Here: which ended attempts count. Not here: the counting (`rules.binding.canaries`). Called by `request_manager`, on its
thread.
"""

from __future__ import annotations

import asyncio
from typing import Any

from omnipipeline_spec.types.plan import CanaryShare
from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.membership import Membership
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Counter, Histogram, Samples
from stage_runtime.rules.binding.canaries import FAULTS, Outcomes


class RevisionOutcomes:
    """The attempts of all revisions that are served now."""

    def __init__(self, membership: Membership, loop: asyncio.AbstractEventLoop) -> None:
        self._membership = membership
        self._loop = loop
        self._tried: str | None = None
        #: Revision -> its attempts since one is tried, so that they are compared over the same time.
        self._since: dict[str, Outcomes] = {}
        self._requests = Counter(catalog.REVISION_REQUESTS)
        self._times = Histogram(catalog.REVISION_TIME)

    def share(self, canary: CanaryShare | None) -> None:
        """Another revision is tried, or another share; None: none is tried."""
        tried = None if canary is None else canary.revision
        if tried != self._tried:
            self._tried = tried
            self._since.clear()

    def attempt_failed(self, handle: RequestHandle) -> None:
        """An attempt is over by a fault; the request may be sent again, to another revision, too."""
        if handle.judged_attempt == handle.tracked.attempt or not self._is_served(handle.revision):
            return
        handle.judged_attempt = handle.tracked.attempt
        self._of(handle.revision).fail()
        self._requests.add(handle.revision, "failed")

    def ended(self, handle: RequestHandle, code: str | None) -> None:
        """A request is over. code: of its failure; None: it is complete."""
        if code in FAULTS:
            self.attempt_failed(handle)
        elif code is None and self._is_served(handle.revision):
            took_s = max(self._loop.time() - handle.attempt_began_at, 0.0)
            self._of(handle.revision).complete(took_s)
            self._requests.add(handle.revision, "completed")
            self._times.observe(took_s, handle.revision)

    def status(self) -> dict[str, Any]:
        """The attempts of each revision since one is tried; empty while none is."""
        if self._tried is None:
            return {}
        served = [one.revision for one in self._membership.state.revisions]
        return {revision: self._since.get(revision, Outcomes()).report() for revision in served}

    def samples(self) -> Samples:
        for counts in (self._requests, self._times):
            counts.keep(lambda labels: self._is_served(labels[0]))
        return {**self._requests.samples(), **self._times.samples()}

    def _of(self, revision: str) -> Outcomes:
        return self._since.setdefault(revision, Outcomes())

    def _is_served(self, revision: str) -> bool:
        return any(one.revision == revision for one in self._membership.state.revisions)
