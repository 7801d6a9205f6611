"""The instances and their complete sets, as `membership_state` keeps them, and the error if none is complete. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.binding.balancing import GroupLoad, Load
from stage_runtime.rules.binding.pools import Pool
from stage_runtime.wire.parts import Member


class Instance(Load, kw_only=True):
    """One member as the coordinator sees it."""

    member: Member
    edges: str = ""  #: The schema of the edges that it declares (`rules.graph.edges`).
    ready: bool = False
    draining: bool = False
    aside: bool = False  #: Its pod was taken out of the unit, to be examined: it gets no new request.
    linked: set[str] = msgspec.field(default_factory=set)  #: Instances of large groups that got requests from it.
    partners: dict[str, Partners] = msgspec.field(default_factory=dict)  #: Partners by large group.

    @property
    def eligible(self) -> bool:
        return self.ready and not self.draining and not self.aside


class Partners(msgspec.Struct):
    """The instances of one large group that requests of one instance go to."""

    pool: Pool[Instance]
    changes: int  #: The pools' count of changes when this was computed.
    all: Sequence[Instance]
    linked: list[Instance]  #: Those of them that got requests from it.
    well_linked: bool  #: Nearly all of them did.


class GroupChoice(msgspec.Struct):
    """One group of a complete set."""

    group: str
    pool: Pool[Instance]  #: Its eligible instances.
    load: GroupLoad
    sources: tuple[int, ...]  #: The choices before it whose instances send to it.


class Sets(msgspec.Struct):
    """The complete sets of one revision, as long as none of its pools becomes empty."""

    revision: PipelineRevision
    stages: dict[str, str]  #: stage -> group, of those that the request may meet
    choices: list[GroupChoice]  #: Only groups of these stages; a group comes after those that send to it.
    prefills: dict[str, str] = {}  #: Prefill stage -> group, of the decode stages among ``stages``.
    weight: float = 0.0  #: The weight of the smooth weighted round robin.

    @property
    def count(self) -> int:
        """Complete sets: the minimum over its groups."""
        return min(len(choice.pool) for choice in self.choices)


class Wanted(NamedTuple):
    """A request's needs of a revision."""

    terminals: frozenset[str] | None  #: None: all.
    required: frozenset[str]  #: Stages that a route has led to.


class Needs(NamedTuple):
    """A request's needs of a revision."""

    met: dict[str, str]  #: stage -> group, of the stages that it may meet.
    certain: list[str]  #: Those without which it cannot be served.


class Unbindable(Exception):
    """No complete set of instances: ``groups`` have none that is ready."""

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__(f"no ready instance of {', '.join(groups)}")
        self.groups = tuple(groups)


def host_of(endpoint: str) -> str:
    """``tcp://10.0.0.7:5550`` → ``10.0.0.7``; a Unix socket has none."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else ""
    return host.strip("[]")
