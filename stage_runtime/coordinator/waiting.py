"""Requests without a binding: they wait for an instance. Called by `request_manager`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.coordinator.bindings import Bindings
from stage_runtime.coordinator.membership import Membership
from stage_runtime.coordinator.request_handles import RequestHandle
from stage_runtime.errors import RequestError

log = logging.getLogger(__name__)

NEW_INSTANCE_WAIT_S: Final = 5.0  # a retry without another instance waits so long for a new incarnation
LOOK_AGAIN_S: Final = 0.25  # meanwhile: connections that come back are not reported here


class Rebinding:
    """Requests whose attempt was given up: bound again at once, or when an instance comes.

    While they wait they are bound to no instance that may be dead: none whose connection to this coordinator is broken,
    and none that a stage of an earlier attempt did not reach a moment ago. An attempt there would spend the retry.
    """

    def __init__(
        self,
        bindings: Bindings,
        membership: Membership,
        loop: asyncio.AbstractEventLoop,
        *,
        submit: Callable[[RequestHandle, PipelineRevision, dict[str, str]], None],
        gave_up: Callable[[RequestHandle, str], None],
    ) -> None:
        """submit: sends a request under new bindings. gave_up: called with the reason if nothing could be bound in
        time."""
        self._bindings = bindings
        self._membership = membership
        self._loop = loop
        self._submit = submit
        self._gave_up = gave_up
        self._awaiting: dict[RequestHandle, asyncio.TimerHandle] = {}  #: Those that wait for an instance.
        self._look_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many wait for an instance."""
        return len(self._awaiting)

    def rebind(self, handle: RequestHandle) -> None:
        """Bind it to other instances, or wait for one."""
        if not self._try(handle, self._excluded(handle)):
            handle.bindings = {}
            self._awaiting[handle] = self._loop.call_later(NEW_INSTANCE_WAIT_S, self._give_up, handle)
            if self._look_timer is None:
                self._look_timer = self._loop.call_later(LOOK_AGAIN_S, self._look)

    def instances_changed(self) -> None:
        """An instance is ready, or a connection may be back: bind the requests that wait."""
        in_vain = set[tuple[tuple[str, ...], frozenset[str]]]()  # what cannot be bound for one cannot for the next
        for handle in list(self._awaiting):
            excluded = self._excluded(handle)
            same = (tuple(handle.tracked.terminals), excluded)
            if same not in in_vain and not self._try(handle, excluded):
                in_vain.add(same)

    def forget(self, handle: RequestHandle) -> None:
        """The request is over."""
        timer = self._awaiting.pop(handle, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._awaiting.values():
            timer.cancel()
        if self._look_timer is not None:
            self._look_timer.cancel()

    def _look(self) -> None:
        self._look_timer = None
        self.instances_changed()
        if self._awaiting:
            self._look_timer = self._loop.call_later(LOOK_AGAIN_S, self._look)

    def _excluded(self, handle: RequestHandle) -> frozenset[str]:
        now = self._loop.time()
        unreachable = [one for one, until in handle.unreachable.items() if now < until]
        return frozenset(unreachable).union(self._membership.interrupted)

    def _try(self, handle: RequestHandle, excluded: frozenset[str]) -> bool:
        try:
            revision, bindings = self._bindings.choose(
                handle.id, avoid=handle.avoid, exclude=excluded, terminals=handle.tracked.terminals
            )
        except RequestError:
            return False
        self.forget(handle)
        log.info("request %s is sent again, after attempt %d of it", handle.id, handle.tracked.tries)
        self._submit(handle, revision, bindings)
        return True

    def _give_up(self, handle: RequestHandle) -> None:
        self._awaiting.pop(handle, None)
        if self._try(handle, frozenset()):  # there is an instance, which may be reached again by now
            return
        lacking = ", ".join(self._membership.state.lacking(terminals=handle.tracked.terminals))
        self._gave_up(handle, f"no instance of {lacking} came within {NEW_INSTANCE_WAIT_S:.0f} s")
