"""The stages that a request still needs: the part of the others is over, and their process may end. Pure.

A stage is needed while the request waits for it as a terminal, or while a needed one may still get input from it. A
stage that has begun and has no streams as input has had all of it: it begins with its payload, of a join with all that
is joined. One that reports that all its input is here has had it, too, streams to their ends. A stage that is not
known to have begun has not. A prefill stage is never needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stage_runtime.rules.graph import kvpairs
from stage_runtime.rules.graph.kvpairs import Edge


def stages(
    edges: Iterable[Edge], waiting: Collection[str], begun: Collection[str], supplied: Collection[str] = ()
) -> set[str]:
    """waiting: the terminal stages that have not completed. begun: stages of which something has come. supplied: stages
    that have all their input.
    """
    edges = kvpairs.without(edges)
    streamed = {target for _, target, kind in edges if kind == "stream"}
    sources: dict[str, list[str]] = {}
    for source, target, _ in edges:
        sources.setdefault(target, []).append(source)
    found = set(waiting)
    new = list(found)
    while new:
        stage = new.pop()
        if stage in supplied or (stage in begun and stage not in streamed):
            continue
        fresh = set(sources.get(stage, ())) - found
        found |= fresh
        new += fresh
    return found
