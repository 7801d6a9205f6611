"""Whether this pipeline can serve any request at all: what load balancers ask for. Called by `request_manager`.

Not here: whether this process is ready (`membership.ready`), which its pod's kubelet asks for: a coordinator without
stages answers with the reason, and another one would not do better.
"""

from __future__ import annotations

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.coordinator.events import StageNeed
from stage_runtime.coordinator.membership import Membership
from stage_runtime.rules.graph import kvpairs, partial_binding
from stage_runtime.rules.members.absences import Outlook


class ServiceHealth:
    """Looks at the stages that every request needs. One that is expected back is not a reason to send clients away."""

    def __init__(self, membership: Membership, *, chosen: bool) -> None:
        """chosen: a hook chooses the terminals of each request."""
        self._membership = membership
        self._chosen = chosen
        self._known: PipelineRevision | None = None  #: The pipeline revision of which ``_certain`` is.
        self._certain: frozenset[str] = frozenset()

    def problem(self) -> str | None:
        """Why no request can be served now, nor soon; None: requests are served, or wait for an instance to come."""
        problems = [self._problem_of(one) for one in self._membership.state.revisions]
        return "no pipeline is known" if not problems else None if None in problems else problems[-1]

    def needs(self) -> list[StageNeed]:
        """The newest revision: its stages, which of them every request needs, and how many instances each has."""
        if not self._membership.state.revisions:
            return []
        revision = self._membership.state.revisions[-1]
        needed = self._needed(revision)
        return [
            StageNeed(
                stage=stage,
                group=group,
                needed=stage in needed,
                instances=len(self._membership.state.serving(revision, group)),
            )
            for stage, group in revision.stages.items()
        ]

    def _problem_of(self, revision: PipelineRevision) -> str | None:
        membership = self._membership
        needed = self._needed(revision)
        stages = [stage for stage in revision.stages if stage in needed]
        prospect = membership.prospect_of(revision, stages)
        names = ", ".join(prospect.groups)
        seen = membership.groups_seen
        if not all(group in seen or membership.starts_on_demand(group) for group in prospect.groups):
            return f"no instance of {names} has come yet"
        if prospect.outlook is Outlook.GONE:
            return f"no instance of {names} is left, and none is expected"
        for group in dict.fromkeys(revision.stages[stage] for stage in stages):
            there = membership.state.serving(revision, group)
            if there and all(map(membership.stands, there)):
                return f"the queue of {group} stands"
        return None

    def _needed(self, revision: PipelineRevision) -> frozenset[str]:
        """The stages that every request needs: those without which none is served, and all that are gone when one of
        several is.
        """
        if revision is not self._known:
            self._known, self._certain = revision, partial_binding.of_every_request(revision, chosen=self._chosen)
        gone = [
            one
            for one in kvpairs.served(revision)
            if self._membership.prospect_of(revision, [one]).outlook is Outlook.GONE
        ]
        if not gone or not self._certain.isdisjoint(gone):
            return self._certain
        choices = partial_binding.choices(revision, chosen=self._chosen)
        if any(partial_binding.stages(revision, wanted, missing=gone) is not None for wanted in choices):
            return self._certain
        return self._certain.union(gone)
