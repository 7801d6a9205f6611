"""Draws the pictures of this folder: ``make pictures``. A test compares them with what is drawn.

Not here: pictures of a pipeline, which `omni plan -o svg` draws.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from docs.pictures import hops, relays, request, rooms, scaling, scaling_tables, terminal

FOLDER: Final = Path(__file__).parent

PICTURES: Final[dict[str, Callable[[], str]]] = {
    "engine-rooms.svg": rooms.draw_engine,
    "hops.svg": hops.draw,
    "omni-up.svg": lambda: terminal.draw((FOLDER / "omni-up.ansi").read_text()),
    "relays.svg": relays.draw,
    "request.svg": request.draw,
    "rooms.svg": rooms.draw,
    "scaling.svg": scaling.draw,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
    scaling_tables.write()


if __name__ == "__main__":
    main()
