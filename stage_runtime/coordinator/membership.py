"""The pipeline's members, as this coordinator sees them: registration, readiness, beats, departures.

One room, because each of these events changes the same `state`, whose rules are `rules.binding.membership_state`'s. Not
here: who is told of whom (`neighbours`), what is reported (`reporting.member_reports`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Final, NamedTuple

import msgspec

from omnipipeline_spec.types.plan import PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.neighbours import Neighbours
from stage_runtime.coordinator.plane_ends import PlaneEnds
from stage_runtime.errors import LimitReached
from stage_runtime.metrics import planes
from stage_runtime.rules.binding.instances import Instance
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.graph import kvpairs
from stage_runtime.rules.members import beats
from stage_runtime.rules.members.absences import Absences, Outlook, Prospect, UnitKind
from stage_runtime.rules.members.standing import Standing
from stage_runtime.rules.members.welcomes import Welcomes
from stage_runtime.wire.frames import PROTOCOL
from stage_runtime.wire.messages import Beat, Deregister, Hello, Members, Rejected, Unbound, Welcome
from stage_runtime.wire.parts import Member

log = logging.getLogger(__name__)

READY_AFTER_S: Final = 30.0  # without a complete set, a coordinator is ready then: its 503 names a stage
#: Seconds after an instance has named a member that this coordinator does not know: by then it has registered here, if
#: it lives. This coordinator may have started a moment ago.
REGISTERED_BY_S: Final = 30.0
FENCED_KEPT: Final = 10_000
STANDS_LEAST_S: Final = 10.0  # a queue that stands for less is a busy one
SENT_AT_ONCE: Final = 100
FENCED: Final = "this incarnation was declared dead"


class MembershipTimes(NamedTuple):
    """How long a coordinator waits for processes."""

    ready_after_s: float = READY_AFTER_S
    registered_by_s: float = REGISTERED_BY_S


DEFAULT_TIMES: Final = MembershipTimes()


class CoordinatorIdentity(NamedTuple):
    """The name of one coordinator, and where processes reach it."""

    pipeline: str
    incarnation: str
    endpoint: str
    publisher: str  #: The endpoint of its broadcasts.


class BoundRequests(NamedTuple):
    """The coordinator's requests, as far as its members depend on them."""

    bound_to: Callable[[str], int]  #: How many are bound to an instance.
    last_attempt: Callable[[], int]  #: Any that begins later has a higher number.


class Joined(NamedTuple):
    """The changes that a Hello has made."""

    new: bool  #: It was not a member before.
    replaced: list[str]  #: Members that this proves gone: they were at the same endpoint.


class Membership:
    """All members and the revisions they may serve. This runs on the I/O thread."""

    def __init__(
        self,
        me: CoordinatorIdentity,
        revisions: Sequence[PipelineRevision],
        ends: PlaneEnds,
        *,
        requests: BoundRequests,
        hold_s: float,
        dead_after_s: float,
        times: MembershipTimes = DEFAULT_TIMES,
    ) -> None:
        """hold_s: for how long an instance is expected after the last one of its group has left.
        dead_after_s: beats come more often, unless this coordinator asks for fewer.
        """
        self.incarnation = me.incarnation
        self.state = MembershipState(revisions)
        self.beats: dict[str, Beat] = {}  #: The last beat of each instance.
        self._me = me
        self._channels = ends.channels
        self._relays = ends.relays
        self._requests = requests
        self._loop = ends.loop
        self._times = times
        self._beat_s = 0.0  #: The beat that was sent last to members.
        self._refusals: dict[str, str] = {}  #: Refusals as logged, by sender; oldest first.
        self._welcomes = Welcomes()
        #: Incarnations declared dead -> their endpoints; oldest first. Empty: another process has taken that over.
        self._fenced: dict[str, str] = {}
        self.neighbours = Neighbours(
            self.state, ends.channels.send, ends.loop, fenced=self._fenced, registered_by_s=times.registered_by_s
        )
        self._started_at = time.monotonic()
        self._was_complete = False
        self.stopping = False  #: This coordinator ends: members that leave are not reported.
        self._rests = _rests(revisions)
        self._absences = Absences(hold_s)
        self.groups_seen: set[str] = set()  #: Groups that had an instance which took requests.
        self._longest_beat_s = dead_after_s
        self._standing = Standing(max(hold_s, STANDS_LEAST_S))
        self._note_absences()

    # --- events from processes ------------------------------------------------------------------------------------

    def hello(self, sender: str, message: Hello) -> Joined | None:
        """A process sends Hello. None: it is refused; otherwise it has a link."""
        member = message.member
        refusal = self._refusal(sender, message)
        if refusal is None:
            try:
                self._channels.connect(sender, member.endpoint)
            except LimitReached as error:
                refusal = f"this coordinator has no room for another instance: {error}"
        if refusal is not None:
            self._refuse(sender, message, refusal)
            return None
        if not self._welcomes.due(sender, message, time.monotonic()):
            return Joined(new=False, replaced=[])
        if self._fenced.pop(sender, None) is not None:
            self.neighbours.send_gone()  # before it is introduced again
        known = self.state.instances.get(sender)
        # Attempts that were bound to it are over before a process says Hello for the first time, or again. One that
        # is ready and repeats it may have found us at a second address.
        attempts_over = 0 if known is not None and known.ready else self._requests.last_attempt()
        self._relays.open(sender, member.relays)
        # Not before it sends Ready: a request that comes before Welcome could not be answered. One that was fenced is
        # ready already, and its neighbours may reach it before Welcome does.
        replaced = self.state.join(msgspec.structs.replace(member, ready=False), message.edges)
        for gone in replaced:
            self.fence(gone, replaced=True)
        facts = self._relays.facts()
        me = Member(self.incarnation, COORDINATOR, "", "", self._me.endpoint, facts, (), attempts_over=attempts_over)
        # A member that sends Hello again has found us at a second address, or has given up its link to us.
        self._channels.send(sender, Welcome(self._me.publisher, me, message.via, self._beat_s))
        self._adapt_beats()  # after it: a process that was not welcomed yet has no link for Members
        if known is None:
            log.debug(
                "%s (%s, unit revision %s) has joined from %s", member.group, sender, member.revision, member.endpoint
            )
            self._log_ineligible(sender)
        return Joined(new=known is None, replaced=replaced)

    def unknown_peer(self, sender: str) -> None:
        """A message came from a process without a link. A fenced one is notified that it was fenced."""
        endpoint = self._fenced.get(sender)
        if endpoint:
            self._channels.dismiss(sender, endpoint, Rejected(sender, FENCED, fenced=True))

    def ready_now(self, sender: str) -> bool:
        """An instance takes requests from now on."""
        known = self.state.instances.get(sender)
        if known is None:
            return False
        self._welcomes.read(sender)
        if not known.ready:  # it sends Ready again after each Welcome
            log.info("%s (%s) is ready", known.member.group, sender)
        self.state.mark(sender, ready=True)
        self.groups_seen.add(known.member.group)
        self._note_absences()
        self._was_complete = self._was_complete or self.state.complete()
        return True

    def beat(self, sender: str, message: Beat) -> None:
        instance = self.state.instances.get(sender)
        if instance is None:
            return  # refused, and not gone yet
        self._standing.beat(sender, message.waiting, message.progress, self._loop.time())
        if self.beats.get(sender) is message and instance.at_rest:
            return  # nothing has changed, as for most members of a large fleet
        self.beats[sender] = message
        waiting, running = sum(message.waiting.values()), sum(message.running.values())
        self.state.beat(sender, waiting, running, *planes.kv_blocks(message.gauges))

    def deregister(self, sender: str, message: Deregister) -> None:
        if self.state.mark(sender, draining=True):
            log.debug("%s is draining: %s", sender, message.reason)
            self._note_absences()
            self.unbound(sender)

    def unbound(self, incarnation: str) -> None:
        """One request fewer is bound to it. A draining instance is notified when no request is left."""
        instance = self.state.instances.get(incarnation)
        if instance is not None and instance.draining and not self._requests.bound_to(incarnation):
            self._channels.send(incarnation, Unbound())

    def fence(self, incarnation: str, *, replaced: bool = False) -> bool:
        """Remove the member: messages of this incarnation are ignored until it says Hello again, which it does when it
        has dropped all requests of this coordinator. replaced: another process has its endpoint, so it has ended.

        Returns: False when it was not a member.
        """
        instance = self.state.leave(incarnation)
        if instance is None:
            return False
        self._note_absences()
        if not instance.ready:
            self._absences.start_failed(instance.member.group, instance.member.revision, self._loop.time())
        self._fenced[incarnation] = "" if replaced else instance.member.endpoint
        if len(self._fenced) > FENCED_KEPT:
            del self._fenced[next(iter(self._fenced))]
        self.beats.pop(incarnation, None)
        self._standing.leave(incarnation)
        self._welcomes.forget(incarnation)
        self._channels.drop(incarnation)
        self.neighbours.leave(incarnation)
        self._adapt_beats()
        level = logging.DEBUG if self.stopping else logging.INFO
        log.log(level, "%s (%s) has left", instance.member.group, incarnation)
        return True

    # --- what others ask ----------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Once complete, always ready: a missing stage is a 503 with its name, not a pod without traffic.

        Never complete, it is ready in time, too, but not beside processes of another protocol or key: they are served
        by a coordinator of theirs, which stays until this one is ready.
        """
        alone_since = max(self._started_at, self._channels.other_protocol_at)
        self._was_complete = self._was_complete or all(map(self.starts_on_demand, self.state.missing_groups()))
        return self._was_complete or time.monotonic() - alone_since > self._times.ready_after_s

    def prospect(self, terminals: Collection[str] | None, required: Set[str] = frozenset()) -> Prospect:
        """Whether the instances that a request for these terminals needs are here, or on their way: of the revision
        that lacks least. required: as of `MembershipState.bind`.
        """
        found = [self._prospect(missing) for missing in self.state.lacks(terminals, required)]
        return min(found, key=lambda one: (one.outlook, len(one.groups)), default=Prospect(Outlook.GONE))

    def prospect_of(self, revision: PipelineRevision, stages: Iterable[str]) -> Prospect:
        """The same of these stages."""
        return self._prospect(self.state.missing_of(revision, stages))

    def _prospect(self, missing: Iterable[UnitKind]) -> Prospect:
        return self._absences.prospect(missing, self._loop.time(), self.state.loading)

    def stands(self, instance: Instance) -> bool:
        """Whether work waits there, and none of it is begun for a while."""
        beat_s = max(self._longest_beat_s, self._beat_s)
        return self._standing.stands(instance.incarnation, instance.bound, self._loop.time(), beat_s=beat_s)

    def leaves_rest(self, revision: str) -> bool:
        """Whether a request of ``revision`` may be complete while some stage still holds something of it."""
        return self._rests.get(revision, True)

    def update(self, revisions: Sequence[PipelineRevision]) -> None:
        """The list of revisions has changed."""
        self.state.update(revisions)
        self._note_absences()
        self._rests = _rests(revisions)
        self._log_ineligible(*self.state.instances)

    @property
    def interrupted(self) -> Set[str]:
        """The members whose connection is broken at the moment. Many at once are one host or one rack that is lost."""
        return self._channels.interrupted

    def start_on_demand(self, groups: Sequence[str]) -> None:
        """These groups may have no instance until a request needs one."""
        self._absences.on_demand = frozenset(groups)

    def starts_on_demand(self, group: str) -> bool:
        return group in self._absences.on_demand

    def set_aside(self, hosts: Sequence[str]) -> None:
        """The pods at these addresses were taken out of their units: bound requests finish, no new one is bound."""
        changed = self.state.set_aside(hosts)
        self._note_absences()
        for incarnation in changed:
            instance = self.state.instances[incarnation]
            change = "is set aside: its pod was taken out of its unit" if instance.aside else "is back in its unit"
            log.info("%s (%s) %s", instance.member.group, incarnation, change)

    def counters(self) -> dict[str, int]:
        return dict(self._channels.counters)

    # --- inside -------------------------------------------------------------------------------------------------

    def _note_absences(self) -> None:
        self._absences.observe(self.state.missing(), self._loop.time())

    def _refusal(self, sender: str, message: Hello) -> str | None:
        member = message.member
        if sender != member.incarnation:
            return f"its Hello is of {member.incarnation}"
        if self._fenced.get(sender, member.endpoint) != member.endpoint:
            return FENCED
        if message.pipeline != self._me.pipeline:
            return f"belongs to pipeline {message.pipeline!r}, this is {self._me.pipeline!r}"
        if not message.edges.startswith(f"{PROTOCOL}:"):
            return f"has the edges {message.edges!r}, this coordinator protocol {PROTOCOL}"
        known = self.state.instances.get(sender)
        if known is not None and known.member.endpoint != member.endpoint:
            return f"an instance at {known.member.endpoint} has the same incarnation, this one is at {member.endpoint}"
        return None

    def _log_ineligible(self, *incarnations: str) -> None:
        for incarnation in incarnations:
            instance = self.state.instances[incarnation]
            ineligible_reason = self.state.ineligible_reason(instance)
            if ineligible_reason is not None:
                log.info("%s (%s) gets no requests: %s", instance.member.group, incarnation, ineligible_reason)

    def _refuse(self, sender: str, hello: Hello, refusal: str) -> None:
        """Send the reason. The process sends Hello again and again, so each reason is logged once."""
        member = hello.member
        if self._refusals.get(sender) != refusal:
            self._refusals[sender] = refusal
            if len(self._refusals) > FENCED_KEPT:
                del self._refusals[next(iter(self._refusals))]
            log.warning("%s of group %s is refused: %s", sender, member.group, refusal)
        if sender in self.state.instances:
            return  # the link to that name is another process's
        rejected = Rejected(sender, refusal, fenced=refusal == FENCED, via=hello.via)
        self._channels.dismiss(sender, member.endpoint, rejected)

    def _adapt_beats(self) -> None:
        beat_s = beats.interval_s(len(self.state.instances), self._beat_s)
        if beat_s != self._beat_s:
            self._beat_s = beat_s
            self._send_interval(list(self.state.instances), beat_s)

    def _send_interval(self, incarnations: list[str], beat_s: float) -> None:
        """Some in each turn of the loop: with many members it takes a while."""
        for incarnation in incarnations[:SENT_AT_ONCE]:
            self._channels.send(incarnation, Members(beat_s=beat_s))
        if incarnations[SENT_AT_ONCE:] and beat_s == self._beat_s:
            self._loop.call_soon(self._send_interval, incarnations[SENT_AT_ONCE:], beat_s)


def _rests(revisions: Sequence[PipelineRevision]) -> dict[str, bool]:
    return {one.revision: _may_leave_rest(one) for one in revisions}


def _may_leave_rest(revision: PipelineRevision) -> bool:
    """False for a linear pipeline of normal edges: its only terminal stage finishes last, so no stage holds
    anything.
    """
    edges = kvpairs.without(revision.edges)
    sources = [source for source, _, _ in edges]
    streams = any(kind == "stream" for _, _, kind in edges)
    return len(revision.terminals) > 1 or len(set(sources)) < len(sources) or streams
