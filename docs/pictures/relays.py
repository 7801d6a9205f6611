"""The time of a payload by each relay, as a table. The figures are `relays.json`, of one run of
``python -m benchmarks.relays --json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from docs.pictures.style import SANS, page

FIGURES: Final = Path(__file__).with_name("relays.json")
LEFT: Final = 170.0  # where columns begin
COLUMN: Final = 128.0
ROW: Final = 46.0
TOP: Final = 104.0
SIZES: Final = {4096: "4 KiB", 65536: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 256 << 20: "256 MiB"}


class Cell(msgspec.Struct):
    """us: one way. x_tcp: times raw TCP. cpu_us: processor time of both processes."""

    us: float
    x_memcpy: float
    x_tcp: float
    cpu_us: float


def figures() -> dict[str, dict[int, Cell]]:
    return msgspec.json.decode(FIGURES.read_bytes(), type=dict[str, dict[int, Cell]], strict=False)


def draw() -> str:
    table = figures()
    width, height = LEFT + len(SIZES) * COLUMN + 16, TOP + ROW * len(table)
    below = "one way, median; below: times raw TCP of the same run, and processor time of both processes"
    body = [
        '<text class="bold ink" x="24" y="34">From put to the buffer of the receiver</text>',
        f'<text class="dim" x="24" y="56">{below}</text>',
    ]
    for index, label in enumerate(SIZES.values()):
        x = LEFT + (index + 1) * COLUMN - 8
        body.append(f'<text class="bold ink" x="{x:g}" y="{TOP - 22:g}" text-anchor="end">{label}</text>')
    for number, (name, cells) in enumerate(table.items()):
        y = TOP + number * ROW
        body.append(f'<line class="lane" x1="24" x2="{width - 16:g}" y1="{y - 14:g}" y2="{y - 14:g}"/>')
        body.append(f'<text class="bold ink" x="24" y="{y + 6:g}">{name}</text>')
        for index, size in enumerate(SIZES):
            x, cell = LEFT + (index + 1) * COLUMN - 8, cells[size]
            small = f"{cell.x_tcp:.2f}x · {_time(cell.cpu_us)}"
            body.append(f'<text class="ink" x="{x:g}" y="{y + 4:g}" text-anchor="end">{_time(cell.us)}</text>')
            body.append(f'<text class="dim small" x="{x:g}" y="{y + 21:g}" text-anchor="end">{small}</text>')
    style = f"text {{ font: 14px {SANS} }}\ntext.small {{ font-size: 12px }}\n"
    at = 16 << 20
    label = "16 MiB by each relay, times raw TCP: " + ", ".join(
        f"{name} {cells[at].x_tcp:.2f}x" for name, cells in table.items()
    )
    return page(width, height, label, style, body)


def _time(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.3g} ms"
