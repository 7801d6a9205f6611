"""The rooms of the code and who imports whom, read from the import statements.

A room is a folder or a module directly in one of our packages. Only those imports are drawn that do not follow
from others (the transitive reduction); arrows point down, from the importer.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from docs.pictures.style import SANS, page
from stage_runtime.cli.files.drawing.arranging import Arrangement, Size, arrange

ROOT: Final = Path(__file__).parents[2]
ROOM_HEIGHT: Final = 30.0
CHARACTER: Final = 7.6  # width of one of the room's name, at 13 px
GAP_X: Final = 16.0
GAP_Y: Final = 34.0
PAD: Final = 22.0
HEAD: Final = 52.0  # of a package's frame, for its name and what it is
BETWEEN: Final = 40.0

Imports = Mapping[str, frozenset[str]]  #: room -> rooms of the same package that it imports


class Package(NamedTuple):
    name: str
    folder: str  # that holds it, from the repository's root
    about: str
    within: str = ""  # the packages that it is in, each with a dot behind it


CONTRACT: Final = Package("omnipipeline_spec", "crds", "the contract: what a pipeline is, and its plan")
OPERATOR: Final = Package("omnipipeline_operator", "operator", "the operator: a pipeline's Kubernetes objects")
RUNTIME: Final = Package("stage_runtime", ".", "the runtime: what runs in every process")
GUESTS: Final = Package("stage_models", ".", "guests: found by dotted path")
PACKAGES: Final = (CONTRACT, OPERATOR, RUNTIME, GUESTS)
ENGINE: Final = Package(
    "autoregressive", "stage_runtime/engines", "the engine of generating stages", "stage_runtime.engines."
)


class Panel(NamedTuple):
    """A package's rooms at their places."""

    package: Package
    imports: Imports
    places: Arrangement  # transposed: x is the row, y the column
    width: float
    height: float


def draw() -> str:
    """The operator and the runtime side by side, the contract below both, the guests above the runtime."""
    contract, operator, runtime, guests = (_panel(package) for package in PACKAGES)
    width = operator.width + BETWEEN + runtime.width + 2 * PAD
    right = PAD + operator.width + BETWEEN
    middle = PAD + guests.height + BETWEEN
    bottom = middle + max(operator.height, runtime.height) + BETWEEN
    at = {
        GUESTS: (right + (runtime.width - guests.width) / 2, PAD),
        RUNTIME: (right, middle),
        OPERATOR: (PAD, middle + runtime.height - operator.height),
        CONTRACT: ((width - contract.width) / 2, bottom),
    }
    panels = {panel.package: panel for panel in (contract, operator, runtime, guests)}
    body = [TIP]
    for importer, imported in sorted(_between()):
        body.append(_down(panels[importer], at[importer], panels[imported], at[imported]))
    for package, panel in panels.items():
        body += _drawn(panel, *at[package])
    label = "Rooms of the code. " + " ".join(_said(panel) for panel in panels.values())
    return page(width, bottom + contract.height + PAD, label, STYLE, body)


def draw_engine() -> str:
    """The rooms of the engine of generating stages."""
    panel = _panel(ENGINE)
    body = [TIP, *_drawn(panel, PAD, PAD)]
    return page(panel.width + 2 * PAD, panel.height + 2 * PAD, f"Rooms of the engine. {_said(panel)}", STYLE, body)


STYLE: Final = (
    f"text {{ font: 13px {SANS} }}\n.name {{ font-size: 15px; font-weight: 600 }}\n"
    ".frame { fill: none; stroke-width: 1.2 }\n.room { stroke-width: 1.2 }\n.arrow { fill: none; stroke-width: 1.3 }\n"
)
TIP: Final = (
    '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
    ' markerUnits="userSpaceOnUse" orient="auto"><path class="tip-http" d="M0,1 L10,5 L0,9 z"/></marker>'
)


# The content of the code.


def imports_of(package: Package) -> Imports:
    """Every room of a package, and which others of it it imports."""
    found: dict[str, set[str]] = {}
    for file in _files(package):
        room = _room(package, file)
        found.setdefault(room, set())
        prefix = f"{package.within}{package.name}."
        for module in _imported(file):
            if module.startswith(prefix):
                found[room].add(module.removeprefix(prefix).partition(".")[0])
    return {room: frozenset(names & found.keys() - {room}) for room, names in found.items()}


def _between() -> Iterator[tuple[Package, Package]]:
    """The imports of packages."""
    for package in PACKAGES:
        names = {module.partition(".")[0] for file in _files(package) for module in _imported(file)}
        yield from ((package, other) for other in PACKAGES if other != package and other.name in names)


def _files(package: Package) -> Iterator[Path]:
    base = ROOT / package.folder / package.name
    yield from (file for file in sorted(base.rglob("*.py")) if not _room(package, file).startswith("__"))


def _room(package: Package, file: Path) -> str:
    return file.relative_to(ROOT / package.folder / package.name).parts[0].removesuffix(".py")


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reduced(imports: Imports) -> Iterator[tuple[str, str]]:
    """The imports that do not follow from others."""
    beneath = {room: _beneath(imports, room) for room in imports}
    for room, names in sorted(imports.items()):
        for name in sorted(names):
            if not any(name in beneath[other] for other in names if other != name):
                yield room, name


def _beneath(imports: Imports, room: str) -> frozenset[str]:
    """All rooms that one imports, directly or not."""
    found: set[str] = set()
    waiting = list(imports[room])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports[name]
    return frozenset(found)


# How it is drawn.


def _panel(package: Package) -> Panel:
    imports = imports_of(package)
    sizes = {room: Size(ROOM_HEIGHT, _width(room)) for room in sorted(imports)}
    places = arrange(sizes, list(reduced(imports)), gap_x=GAP_Y, gap_y=GAP_X)
    words = max(len(package.name) * 9.0, len(package.about) * 6.6)
    width = max(places.extent.height, words) + 2 * PAD
    return Panel(package, imports, places, width, places.extent.width + HEAD + PAD)


def _width(room: str) -> float:
    return len(room) * CHARACTER + 22


def _drawn(panel: Panel, x: float, y: float) -> Iterator[str]:
    yield f'<rect class="lane frame" x="{x:g}" y="{y:g}" width="{panel.width:g}" height="{panel.height:g}" rx="10"/>'
    yield f'<text class="ink name" x="{x + PAD:g}" y="{y + 22:g}">{panel.package.name}</text>'
    yield f'<text class="dim" x="{x + PAD:g}" y="{y + 40:g}">{escape(panel.package.about)}</text>'
    left = x + (panel.width - panel.places.extent.height) / 2
    top = y + HEAD
    for importer, imported in reduced(panel.imports):
        yield _arrow(panel, importer, imported, left, top)
    for room in sorted(panel.imports):
        place = panel.places.places[room]
        a, b = left + place.y, top + place.x
        yield f'<rect class="box room" x="{a:g}" y="{b:g}" width="{_width(room):g}" height="{ROOM_HEIGHT:g}" rx="6"/>'
        yield f'<text class="ink" x="{a + _width(room) / 2:g}" y="{b + 20:g}" text-anchor="middle">{room}</text>'


def _arrow(panel: Panel, importer: str, imported: str, left: float, top: float) -> str:
    start, end = panel.places.places[importer], panel.places.places[imported]
    way = [(left + start.y + _width(importer) / 2, top + start.x + ROOM_HEIGHT)]
    for bend in panel.places.bends.get((importer, imported), ()):
        x, y = left + bend.y, top + bend.x  # in the middle of a row, which it passes straight
        way += [(x, y - ROOM_HEIGHT / 2), (x, y + ROOM_HEIGHT / 2)]
    way.append((left + end.y + _width(imported) / 2, top + end.x))
    return f'<path class="arrow http" d="{_curve(way)}" marker-end="url(#tip)"/>'


def _curve(points: list[tuple[float, float]]) -> str:
    """A path through all points, downwards at each."""
    way = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (a, b), (c, d) in itertools.pairwise(points):
        half = (b + d) / 2
        way += f" C{a:.1f},{half:.1f} {c:.1f},{half:.1f} {c:.1f},{d:.1f}"
    return way


def _down(importer: Panel, a: tuple[float, float], imported: Panel, b: tuple[float, float]) -> str:
    """An arrow from the lower edge of one frame to the upper edge of another."""
    start = (a[0] + importer.width / 2, a[1] + importer.height)
    end = (min(max(start[0], b[0] + PAD), b[0] + imported.width - PAD), b[1])
    return f'<path class="arrow http" d="{_curve([start, end])}" marker-end="url(#tip)"/>'


def _said(panel: Panel) -> str:
    pairs = ", ".join(f"{importer} to {imported}" for importer, imported in reduced(panel.imports))
    return f"{panel.package.name}: {', '.join(sorted(panel.imports))}." + (f" Imports: {pairs}." if pairs else "")
