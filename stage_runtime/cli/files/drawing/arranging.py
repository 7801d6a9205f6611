"""Places for the boxes of a directed graph, in columns from left to right.

Here: layers by longest path, their order by barycentres, positions by least squares. Not here: what a box is, or how
it is drawn. Pure. Called by `picture`, once for each level of nesting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

Arrow = tuple[str, str]
SWEEPS = 12  # orders and positions of pipelines (at most 64 stages) stand still well before that
LANE = 18.0  # height kept free for an edge that passes a column


class Size(msgspec.Struct, frozen=True):
    width: float
    height: float


class Point(msgspec.Struct, frozen=True):
    x: float
    y: float


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Top left corners, the extent of it all, and where long edges pass the columns between their ends."""

    places: dict[str, Point]
    extent: Size
    bends: dict[Arrow, tuple[Point, ...]]


def arrange(
    sizes: Mapping[str, Size], edges: Iterable[Arrow], *, gap_x: float, gap_y: float, ranks: Mapping[str, int] = {}
) -> Arrangement:
    """Columns of boxes, so that edges lead to the right; those that close a cycle lead back, on lanes of their own.

    sizes: in the order that decides where nothing else does. ranks: columns that are to be kept (0 is the first,
    -1 the last).
    """
    known = [edge for edge in dict.fromkeys(edges) if edge[0] in sizes and edge[1] in sizes and edge[0] != edge[1]]
    forward, back = _acyclic(list(sizes), known)
    layer_of = _pinned(_layers(list(sizes), forward), ranks)
    columns, links, chains = _with_lanes(list(sizes), forward, layer_of)
    every: dict[str, Size] = {**sizes, **{lane: Size(0.0, LANE) for chain in chains.values() for lane in chain}}
    _order(columns, links)
    centres = _centres(columns, links, every, gap_y)
    found = _placed(columns, centres, every, gap_x, chains)
    led_back = {(a, b): found.bends[b, a][::-1] for a, b in back if (b, a) in found.bends}
    return msgspec.structs.replace(found, bends={**found.bends, **led_back})


def _acyclic(names: Sequence[str], edges: Sequence[Arrow]) -> tuple[list[Arrow], list[Arrow]]:
    """Edges without a cycle, and those that a walk in the given order found to lead back: turned round, they are
    among the first.
    """
    followers: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        followers[source].append(target)
    done: set[str] = set()
    path: list[str] = []
    back: set[Arrow] = set()

    def walk(name: str) -> None:
        path.append(name)
        for follower in followers[name]:
            if follower in path:
                back.add((name, follower))
            elif follower not in done:
                walk(follower)
        path.pop()
        done.add(name)

    for name in names:
        if name not in done:
            walk(name)
    turned = ((target, source) if (source, target) in back else (source, target) for source, target in edges)
    return list(dict.fromkeys(turned)), [edge for edge in edges if edge in back]


def _layers(names: Sequence[str], edges: Sequence[Arrow]) -> dict[str, int]:
    layer = dict.fromkeys(names, 0)
    for _ in names:  # at most as many rounds as a path is long
        for source, target in edges:
            layer[target] = max(layer[target], layer[source] + 1)
    return layer


def _pinned(layer: dict[str, int], ranks: Mapping[str, int]) -> dict[str, int]:
    last = max(layer.values(), default=0)
    return {name: (last if ranks[name] < 0 else ranks[name]) if name in ranks else at for name, at in layer.items()}


def _with_lanes(
    names: Sequence[str], edges: Sequence[Arrow], layer: Mapping[str, int]
) -> tuple[list[list[str]], list[Arrow], dict[Arrow, tuple[str, ...]]]:
    """Columns with a lane wherever an edge passes, the short edges that result, and each edge's lanes."""
    columns: list[list[str]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for name in names:
        columns[layer[name]].append(name)
    links: list[Arrow] = []
    chains: dict[Arrow, tuple[str, ...]] = {}
    for source, target in edges:
        lanes = tuple(f"\0{source}\0{target}\0{column}" for column in range(layer[source] + 1, layer[target]))
        for offset, lane in enumerate(lanes, layer[source] + 1):
            columns[offset].append(lane)
        links.extend(pairwise((source, *lanes, target)))
        chains[source, target] = lanes
    return columns, links, chains


def _order(columns: list[list[str]], links: Sequence[Arrow]) -> None:
    """Sort every column by the mean place of its neighbours, sweeping to and fro; few crossings remain."""
    before, after = _neighbours(links)
    for sweep in range(SWEEPS):
        forth = sweep % 2 == 0
        for index in range(1, len(columns)) if forth else range(len(columns) - 2, -1, -1):
            fixed = {name: place for place, name in enumerate(columns[index - 1 if forth else index + 1])}
            beside = before if forth else after
            now = {name: place for place, name in enumerate(columns[index])}
            columns[index].sort(
                key=lambda name: _mean([fixed[n] for n in beside.get(name, ()) if n in fixed], now[name])
            )


def _neighbours(links: Sequence[Arrow]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for source, target in links:
        before.setdefault(target, []).append(source)
        after.setdefault(source, []).append(target)
    return before, after


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _centres(
    columns: Sequence[Sequence[str]], links: Sequence[Arrow], sizes: Mapping[str, Size], gap: float
) -> dict[str, float]:
    """Vertical centres: close to one's neighbours, never overlapping, in the column's order."""
    before, after = _neighbours(links)
    centres = {name: 0.0 for column in columns for name in column}
    for sweep in range(SWEEPS):
        order = columns if sweep % 2 == 0 else list(reversed(columns))
        for column in order:
            wanted = [
                _mean([centres[other] for other in (*before.get(name, ()), *after.get(name, ()))], 0.0)
                for name in column
            ]
            heights = [sizes[name].height for name in column]
            centres.update(zip(column, _spread(wanted, heights, gap), strict=True))
    return centres


def _spread(wanted: Sequence[float], heights: Sequence[float], gap: float) -> list[float]:
    """The centres nearest to those wanted (least squares) that keep order and distance: pooled adjacent violators."""
    offsets = [0.0]
    for above, below in pairwise(heights):
        offsets.append(offsets[-1] + (above + below) / 2 + gap)
    pools: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=False):
        value, count = want - offset, 1
        while pools and pools[-1][0] > value:
            other, size = pools.pop()
            value, count = (value * count + other * size) / (count + size), count + size
        pools.append((value, count))
    bases = [value for value, count in pools for _ in range(count)]
    return [base + offset for base, offset in zip(bases, offsets, strict=False)]


def _placed(
    columns: Sequence[Sequence[str]],
    centres: Mapping[str, float],
    sizes: Mapping[str, Size],
    gap: float,
    chains: Mapping[Arrow, tuple[str, ...]],
) -> Arrangement:
    top = min((centres[name] - size.height / 2 for name, size in sizes.items()), default=0.0)
    places: dict[str, Point] = {}
    middle: dict[str, Point] = {}
    left = 0.0
    for column in columns:
        width = max((sizes[name].width for name in column), default=0.0)
        for name in column:
            size = sizes[name]
            places[name] = Point(left + (width - size.width) / 2, centres[name] - size.height / 2 - top)
            middle[name] = Point(left + width / 2, centres[name] - top)
        left += width + gap
    bottom = max((places[name].y + size.height for name, size in sizes.items()), default=0.0)
    lanes = {lane for chain in chains.values() for lane in chain}
    return Arrangement(
        places={name: place for name, place in places.items() if name not in lanes},
        extent=Size(max(left - gap, 0.0), bottom),
        bends={edge: tuple(middle[lane] for lane in chain) for edge, chain in chains.items() if chain},
    )
