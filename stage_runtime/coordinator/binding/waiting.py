"""Requests that no instance can take now: new ones wait within bounds, those that are sent again whatever the bounds.

Here: who waits, for how long, and in which order they are bound. Not here: the rules (`rules.requests.holding`),
whether an instance is expected (`membership`). Called by `live_requests`.

A request that is sent again is bound to no instance that may be dead: none whose connection to this coordinator is
broken, and none that a stage of an earlier attempt did not reach a moment ago. An attempt there would spend the retry.
Those that an instance has ended under take turns (`suspects`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Final

from omnipipeline_spec.types.plan import CoordinatorPlan, PipelineRevision
from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.binding.bindings import Bindings
from stage_runtime.coordinator.binding.suspects import Suspects
from stage_runtime.coordinator.following import Following
from stage_runtime.coordinator.membership import Membership
from stage_runtime.errors import RequestError
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Samples
from stage_runtime.rules.binding.prefixes import Hashes
from stage_runtime.rules.members.absences import Prospect
from stage_runtime.rules.requests import holding
from stage_runtime.rules.requests.holding import HoldLimits, Step, Verdict
from stage_runtime.rules.requests.lifecycle import NoInstanceCame

log = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 0.25  # connections that come back are not reported here, and time changes what is expected


class Waiting:
    """The requests of one coordinator that have no binding."""

    def __init__(
        self,
        following: Following,
        bindings: Bindings,
        membership: Membership,
        loop: asyncio.AbstractEventLoop,
        plan: CoordinatorPlan,
        suspects: Suspects,
    ) -> None:
        self._following = following
        self._bindings = bindings
        self._membership = membership
        self._loop = loop
        self._limits = HoldLimits(requests=plan.hold_requests, nbytes=plan.hold_bytes)
        self._suspects = suspects
        self._since: dict[RequestHandle, float] = {}  #: Those that wait, and since when.
        self._nbytes = 0  #: Bytes of these.
        #: New requests that might not wait, by reason.
        self._refused: Counter[tuple[str, ...]] = Counter(
            {(one.value,): 0 for one in Verdict if one is not Verdict.WAIT}
        )
        self._look_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._since)

    def choose(
        self,
        request_id: str,
        terminals: tuple[str, ...] | None,
        prefer: AbstractSet[str] = frozenset(),
        prompt: Hashes = (),
    ) -> tuple[PipelineRevision, dict[str, str] | None]:
        """Bindings for a new request, and their revision; None: it must wait for an instance.

        prefer, prompt: as of `Bindings.choose`.

        Raises: RequestError: unavailable: it may not.
        """
        try:
            return self._bindings.choose(
                request_id, avoid=self._suspects.instances, terminals=terminals, prefer=prefer, prompt=prompt
            )
        except RequestError:
            revisions = self._membership.state.having(terminals)
            if not revisions:
                raise
            self.check(request_id, terminals)
            return revisions[-1], None

    def check(self, request_id: str, terminals: Collection[str] | None, nbytes: int = 0) -> None:
        """Whether a new request may wait. nbytes: of it, as far as that is known.

        Raises: RequestError: unavailable: no instance is expected, or too much waits already.
        """
        prospect = self._membership.prospect(terminals)
        verdict = holding.verdict(
            prospect.outlook, nbytes, waiting=len(self._since), waiting_nbytes=self._nbytes, limits=self._limits
        )
        if verdict is Verdict.WAIT:
            return
        self._refused[verdict.value,] += 1
        raise RequestError(
            "unavailable",
            _refusal(prospect, verdict, self._limits),
            stage=prospect.groups[0] if prospect.groups else None,
            request_id=request_id,
            retry_after_s=prospect.retry_after_s,
        )

    def add(self, handle: RequestHandle) -> None:
        """It waits from now on."""
        handle.bindings = {}
        if not self._since:
            groups = ", ".join(self._prospect(handle).groups)
            log.info("requests wait for an instance of %s", groups or "another process")
        self._since[handle] = self._loop.time()
        self._nbytes += _nbytes(handle)
        if self._look_timer is None:
            self._look_timer = self._loop.call_later(LOOK_AGAIN_S, self._look)

    def rebind(self, handle: RequestHandle) -> None:
        """Send it again: to other instances, or when one comes."""
        if not self._try(handle, self._excluded(handle)):
            self.add(handle)

    def instances_changed(self) -> None:
        """An instance is ready, or a connection may be back: bind those that wait, the oldest first."""
        in_vain = set[
            tuple[tuple[str, ...], frozenset[str], frozenset[str]]
        ]()  # what cannot be bound for one cannot for the next
        for handle in sorted(self._since, key=lambda one: one.admitted_at):
            excluded = self._excluded(handle)
            same = (tuple(handle.tracked.terminals), frozenset(handle.required), excluded)
            if same not in in_vain and not self._try(handle, excluded):
                in_vain.add(same)

    def unsent(self) -> list[RequestHandle]:
        """Those of which nothing was ever sent."""
        return [handle for handle in self._since if not handle.tracked.tries]

    def forget(self, handle: RequestHandle) -> None:
        """It is bound, or over. Its body is still there."""
        if self._since.pop(handle, None) is not None:
            self._nbytes -= _nbytes(handle)

    def close(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()

    def by_group(self) -> dict[str, int]:
        """Requests that wait for an instance of each group."""
        waiting = Counter({group: 0 for one in self._membership.state.revisions for group in one.groups})
        for handle in self._since:
            waiting.update(self._prospect(handle).groups)
        return dict(waiting)

    def samples(self) -> Samples:
        return {
            catalog.REQUESTS_WAITING: {(group,): count for group, count in self.by_group().items()},
            catalog.WAITING_BYTES: {(): self._nbytes},
            catalog.REQUESTS_NOT_HELD: dict(self._refused),
        }

    # --- inside -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._look_timer = None
        self.instances_changed()
        for handle, since in list(self._since.items()):
            self._step(handle, self._loop.time() - since)
        if self._since:
            self._look_timer = self._loop.call_later(LOOK_AGAIN_S, self._look)

    def _step(self, handle: RequestHandle, waited_s: float) -> None:
        """It could not be bound a moment ago."""
        prospect = self._prospect(handle)
        step = holding.step(prospect.outlook, waited_s, again=handle.tracked.tries > 0 and not handle.required)
        if step is Step.TAKE_ANY:
            self._try(handle, self._suspects.taken(handle))
        elif step is Step.GIVE_UP:
            self.forget(handle)
            stage = prospect.groups[0] if prospect.groups else None
            self._following.happen(handle, NoInstanceCame(_given_up(handle, prospect.groups, waited_s), stage))

    def _prospect(self, handle: RequestHandle) -> Prospect:
        return self._membership.prospect(handle.tracked.terminals, handle.required)

    def _excluded(self, handle: RequestHandle) -> frozenset[str]:
        if not handle.tracked.tries:
            return frozenset()
        now = self._loop.time()
        unreachable = [one for one, until in handle.unreachable.items() if now < until]
        return self._suspects.taken(handle).union(unreachable, self._membership.interrupted)

    def _try(self, handle: RequestHandle, excluded: frozenset[str]) -> bool:
        try:
            revision, bindings = self._bindings.choose(
                handle.id,
                avoid=handle.avoid,
                exclude=excluded,
                terminals=handle.tracked.terminals,
                required=handle.required,
                prompt=handle.prompt,
            )
        except RequestError:
            return False
        self.forget(handle)
        if handle.tracked.tries:
            log.info("request %s is sent again, after attempt %d of it", handle.id, handle.tracked.tries)
        self._following.submit(handle, revision, bindings)
        return True


def _nbytes(handle: RequestHandle) -> int:
    return 0 if handle.extracted is None else handle.extracted.held_nbytes


def _given_up(handle: RequestHandle, missing: tuple[str, ...], waited_s: float) -> str:
    """missing: groups without an instance; empty: no revision has the request's terminals any more."""
    if not missing:
        return f"the pipeline has no terminal stage {', '.join(map(repr, handle.tracked.terminals))} any more"
    came = f"came within {waited_s:.0f} s" if waited_s >= 1 else "is ready or expected"
    reason = f"no instance of {', '.join(missing)} {came}"
    return f"{reason}; the route leads to {', '.join(sorted(handle.required))}" if handle.required else reason


def _refusal(prospect: Prospect, verdict: Verdict, limits: HoldLimits) -> str:
    problem = f"no ready instance of {', '.join(prospect.groups)}"
    match verdict:
        case Verdict.REQUESTS:
            return f"{problem}, and {limits.requests} requests wait for one"
        case Verdict.BYTES:
            return f"{problem}, and requests of {limits.nbytes} bytes wait for one"
    return problem
