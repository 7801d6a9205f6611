"""The instances of the next group that an instance is bound to: a bounded, even and stable choice. Pure.

The instances of each group stand on a circle, in the order of their incarnations, which are random. An instance at
``position`` of its group is bound to an arc of the next group's circle around the same angle. So

- each instance has the same number of partners, at most `size`;
- two instances of the next group are partners of equally many, or of one more;
- a process that joins or leaves moves each arc by few places;
- coordinators with the same members compute the same arcs, and share the links between instances.

Called by `rules.binding.membership_state`, which takes another instance under load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

SUBSET: Final = 16  # partners of an instance in one group: a link costs sockets and memory; fewer balance worse
SOURCES_LEAST: Final = 4  # of each instance: the instances that may be bound to it, where their group has as many


#: The place where it starts on a circle, and how many places it has. Made for each binding.
Arc: TypeAlias = tuple[int, int]


def size(sources: int, targets: int) -> int:
    """How many of ``targets`` instances each of ``sources`` is bound to."""
    return min(targets, max(SUBSET, -(-SOURCES_LEAST * targets // sources)))


def arc(position: int, sources: int, targets: int) -> Arc:
    """The partners of the instance at ``position`` of ``sources`` among ``targets``."""
    length = size(sources, targets)
    return (position * targets // sources - length // 2) % targets, length


def common(arcs: Iterable[Arc], targets: int) -> Arc:
    """The places that all arcs have; those of the first arcs when no place is in all.

    A stage with several sources is served by one instance, which should be a partner of each.
    """
    (start, length), *others = arcs
    for its_start, its_length in others:
        after = (its_start - start) % targets
        before = (start - its_start) % targets
        if after < length:
            start, length = its_start, min(length - after, its_length)
        elif before < its_length:
            length = min(its_length - before, length)
    return start, length


def places(circle: Sequence[T], of: Arc) -> Sequence[T]:
    """The items on an arc."""
    start, length = of
    found = circle[start : start + length]
    missing = length - len(found)
    return [*found, *circle[:missing]] if missing else found
