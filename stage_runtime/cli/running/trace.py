"""``omni trace``: one request's time, drawn as a waterfall in the terminal. Needs no profile: it is always known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from omnipipeline_spec import consoles, terminal
from omnipipeline_spec.types.errors import printable
from stage_runtime.cli.running.server import server, server_options
from stage_runtime.profiler import lines

WIDTH_WITHOUT_TERMINAL: Final = 120
NARROWEST_BAR: Final = 10  # in a terminal without room for it there are the numbers alone
NUMBERS: Final = 26  # columns of the start, the duration and the gaps
MARKS: Final = {lines.QUEUE: ("░", "yellow"), lines.FUNCTION: ("█", "green"), lines.HOP: ("─", "cyan")}


@click.command("trace")
@click.argument("request_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="The record as the coordinator has it.")
@server_options
def command(request_id: str, as_json: bool, **which: Any) -> None:
    """Draw where the time of one request went: each stage's queue and function, each hop between stages.

    ID is the answer's `x-request-id`. The last 4096 requests are known.
    """
    with server(**which) as client:
        record = client.json(f"/v1/requests/{quote(request_id, safe='', errors='replace')}")
        if as_json:
            terminal.document(json.dumps(record, indent=2))
            return
        console = consoles.console(width_elsewhere=WIDTH_WITHOUT_TERMINAL)
        console.print(draw(record, width=console.width))


def draw(record: dict[str, Any], *, width: int) -> RenderableType:
    """The waterfall of one answer of ``GET /v1/requests/{id}``, ``width`` columns wide."""
    total_ms = record["total_ms"] if record["total_ms"] is not None else record["age_ms"]
    rows = lines.of_record(record["stages"], record["hops"])
    label_width = max((len(row.label) for row in rows), default=0)
    bar_width = width - label_width - NUMBERS
    drawn = bar_width >= NARROWEST_BAR
    scale = bar_width / max([total_ms, *(row.end_ms for row in rows), 1e-6])
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True, max_width=max(width - NUMBERS + 6, 4))
    if drawn:
        table.add_column(f"0 … {_ms(total_ms)} ms", no_wrap=True)
    table.add_column("START ms", justify="right", no_wrap=True, min_width=8)
    table.add_column("TOOK ms", justify="right", no_wrap=True, min_width=7)
    for row in rows:
        bar = [_bar(row.start_ms, row.parts, scale, bar_width)] if drawn else []
        style = "dim" if row.parts[0][0] == lines.HOP else "bold"
        table.add_row(Text(row.label, style=style), *bar, _ms(row.start_ms), _ms(row.end_ms - row.start_ms))
    shown: list[Text | Table] = [_headline(record, total_ms), Text(), table]
    if record.get("error"):
        error = record["error"]
        where = f" in {error['stage']}" if error.get("stage") else ""
        shown.append(Text(printable(f"{error['code']}{where}: {error['message']}"), style="red"))
    if not rows:
        shown.append(Text("no stage has reported yet", style="dim"))
    elif drawn:
        legend = Text("queue ", style="dim")
        for part, word in ((lines.QUEUE, "  function "), (lines.FUNCTION, "  hop "), (lines.HOP, "")):
            mark, style = MARKS[part]
            legend.append(mark, style=style).append(word)
        shown.append(legend)
    return Group(*shown)


def _bar(start_ms: float, parts: Sequence[tuple[str, float]], scale: float, width: int) -> Text:
    """Each part from where the one before ends; what is shorter than a column still has one."""
    begin = min(max(round(start_ms * scale), 0), width - 1)
    bar, at_ms = Text(" " * begin), start_ms
    for part, took_ms in parts:
        mark, style = MARKS[part]
        at_ms += took_ms
        end = min(max(round(at_ms * scale), 0), width)
        if took_ms > 0 and len(bar) < width:
            bar.append(mark * max(end - len(bar), 1 if took_ms * scale >= 0.1 or len(parts) == 1 else 0), style=style)
    return bar


def _headline(record: dict[str, Any], total_ms: float) -> Text:
    colour = {"completed": "green", "failed": "red", "cancelled": "yellow"}.get(record["state"], "cyan")
    first = record["first_event_ms"]
    after = f", first output after {_ms(first)} ms" if first is not None else ""
    tries = f", attempt {record['attempt']}" if record["attempt"] > 1 else ""
    return Text.assemble(
        (record["id"], "bold"),
        f"  {record['kind']}  ",
        (record["state"], colour),
        f"  {_ms(total_ms)} ms{after}{tries}",
    )


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"
