"""The bindings of requests to instances: the one place that binds and unbinds. Called by `live_requests`.

`rules.binding.membership_state` decides who may be bound. A request without a binding waits for an instance in
`waiting`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.membership import Membership
from stage_runtime.errors import RequestError
from stage_runtime.rules.binding.instances import Unbindable
from stage_runtime.rules.binding.prefixes import Hashes, Prefixes
from stage_runtime.rules.graph import kvpairs, needed

RETRY_AFTER_S: Final = 1.0


class Bindings:
    """The bindings of all requests of one coordinator."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        #: incarnation -> requests bound to it. A request is listed under exactly the values of its ``bindings`` from
        #: `attach` until `release`; no entry is empty.
        self._by_instance: dict[str, set[RequestHandle]] = {}
        self._prefixes = Prefixes()

    def choose(
        self,
        request_id: str,
        *,
        avoid: set[str],
        terminals: tuple[str, ...] | None,
        exclude: AbstractSet[str] = frozenset(),
        required: AbstractSet[str] = frozenset(),
        prefer: AbstractSet[str] = frozenset(),
        prompt: Hashes = (),
    ) -> tuple[PipelineRevision, dict[str, str]]:
        """A revision and an instance for each stage that the request may meet and that has any. They count it as load
        from now on: `attach` or `give_back` must follow.

        avoid, exclude, required, prefer: as of `MembershipState.bind`. prompt: `prefixes.hashes`: it goes where its
        beginning is cached, as far as that is known, and is known there from now on.
        Raises: RequestError: no set of instances is complete.
        """
        try:
            interrupted = self._membership.interrupted
            avoid = avoid | interrupted if interrupted else avoid
            state = self._membership.state
            revision, bindings = state.bind(
                avoid=avoid,
                exclude=exclude,
                terminals=terminals,
                required=required,
                prefer=prefer,
                hints=self._prefixes.hints(prompt),
            )
        except Unbindable as error:
            raise RequestError(
                "unavailable",
                str(error),
                stage=error.groups[0],
                request_id=request_id,
                retry_after_s=RETRY_AFTER_S,
            ) from error
        if prompt:
            self._prefixes.note(prompt, {one for one in bindings.values() if state.caching(one)})
        return revision, bindings

    def give_back(self, bindings: dict[str, str]) -> None:
        """Return a choice that is not used."""
        self._membership.state.unbind(bindings)

    def attach(self, handle: RequestHandle, revision: PipelineRevision, bindings: dict[str, str]) -> None:
        """Bind the request to what was chosen for it."""
        handle.bindings = bindings
        handle.revision = revision.revision
        handle.away = self._membership.state.away(revision, bindings, handle.tracked.terminals)
        for incarnation in set(bindings.values()):
            self._by_instance.setdefault(incarnation, set()).add(handle)

    def release(self, handle: RequestHandle) -> None:
        """Decrease the load of its instances. ``handle.bindings`` keeps their incarnations."""
        self._membership.state.unbind(handle.bindings)
        for incarnation in set(handle.bindings.values()):
            bound = self._by_instance.get(incarnation)
            if bound is not None:
                bound.discard(handle)
                if not bound:
                    del self._by_instance[incarnation]
                    self._membership.unbound(incarnation)

    def lost(self, incarnation: str) -> list[RequestHandle]:
        """The instance is gone. Returns: the requests that still need it; the others are no longer bound to it."""
        hurt = []
        for handle in self.on(incarnation):
            if _needs(handle, incarnation):
                hurt.append(handle)
            else:
                handle.bindings = {stage: bound for stage, bound in handle.bindings.items() if bound != incarnation}
        return hurt

    def spare(self, incarnation: str) -> None:
        """The instance drains: requests that have it as a prefill instance only are bound to it no longer. It finishes
        the prompts that it computes now; a decode stage computes the others itself.
        """
        for handle in self.on(incarnation):
            if kvpairs.prefills_alone(handle.edges, handle.bindings, incarnation):
                handle.bindings = {stage: bound for stage, bound in handle.bindings.items() if bound != incarnation}
                self._membership.state.unbind({"": incarnation})
                self._by_instance[incarnation].discard(handle)
        if not self._by_instance.get(incarnation, True):
            del self._by_instance[incarnation]

    def drop(self, incarnation: str) -> None:
        """The instance is gone, and no request is bound to it any more."""
        self._by_instance.pop(incarnation, None)

    def on(self, incarnation: str) -> list[RequestHandle]:
        """The requests that are bound to an instance."""
        return list(self._by_instance.get(incarnation, ()))

    def count(self, incarnation: str) -> int:
        return len(self._by_instance.get(incarnation, ()))

    def between(self, one: str, other: str) -> list[RequestHandle]:
        """The requests that are bound to both instances, need both, and fail without the connection. A decode stage
        goes on without a connection to its prefill instance.
        """
        both = self._by_instance.get(one, set()) & self._by_instance.get(other, set())
        return [handle for handle in both if _needs(handle, one) and _needs(handle, other)]


def _needs(handle: RequestHandle, incarnation: str) -> bool:
    """Whether the part of a stage that the instance serves for the request is not over."""
    needs = needed.stages(handle.edges, handle.tracked.waiting, handle.begun, handle.supplied)
    return any(bound == incarnation and stage in needs for stage, bound in handle.bindings.items())
