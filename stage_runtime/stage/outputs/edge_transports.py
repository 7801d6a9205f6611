"""The relay and medium of each edge of a process, to how many instances: for `/metrics` and `/status`.

Pure. Called by `host`, at every beat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeAlias

from omnipipeline_spec.types.plan import StagePlan
from omnipipeline_spec.types.pods import COORDINATOR

EdgeTransport: TypeAlias = tuple[str, str, str, str]  #: source stage, target stage, relay, medium

HERE: Final = ("in_process", "reference")  #: Relay and medium between stages of one process.


def count(
    plans: Iterable[StagePlan],
    stages_of: Mapping[str, Collection[str]],
    coordinators: Iterable[str],
    transport: Callable[[str, str], tuple[str, str]],
) -> dict[EdgeTransport, int]:
    """Instances by edge, relay and medium.

    stages_of: of each peer. transport: of a peer and the wanted relay, the relay and its medium.
    """
    plans = tuple(plans)
    here = {plan.name for plan in plans}
    coordinators = tuple(coordinators)
    found: Counter[EdgeTransport] = Counter()
    for plan in plans:
        targets = {*plan.next, *plan.stream_to} | ({plan.kv_peer} if plan.kv_role == "prefill" else set())
        for target in targets & here:
            found[plan.name, target, *HERE] += 1
        for peer, stages in stages_of.items():
            for target in (targets - here).intersection(stages):
                found[plan.name, target, *transport(peer, plan.relay.backend)] += 1
        for peer in coordinators if plan.terminal else ():
            found[plan.name, COORDINATOR, *transport(peer, plan.relay.backend)] += 1
    return dict(found)
