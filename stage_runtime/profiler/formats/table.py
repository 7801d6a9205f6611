"""The report as text tables."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

from rich.table import Table

from omnipipeline_spec import consoles
from omnipipeline_spec.types.errors import printable

WIDTH: Final = 140
NO_REQUESTS: Final = "No request was recorded: none came while the profile was taken."
PARTIAL: Final = "without a recorded beginning or end"
SHOWN: Final = 20  # of the slowest requests
_FIGURES: Final = ("count", "total_ms", "avg_ms", "p50_ms", "p95_ms", "max_ms")


def text(report: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """The stages, the hops, the slowest requests. ``report``: of `views.build_report`."""
    file = io.StringIO()
    console = consoles.console(file=file, width=width)
    console.print(_headline(report))
    if not report["request_count"]:
        console.print(NO_REQUESTS)
        return file.getvalue()
    for title, key, names in (
        ("Stages: time between two events", "stage_breakdown", ("stage", "open_event", "close_event")),
        ("Hops: time from sending to receiving", "hop_breakdown", ("source", "destination", "kind")),
    ):
        console.print(_table(title, report[key], (*names, *_FIGURES)))
    slowest = sorted(report["timeline"], key=lambda each: -each["duration_ms"])[:SHOWN]
    console.print(_table(f"Slowest requests (at most {SHOWN})", slowest, ("request_id", "duration_ms", "whole")))
    for what, count in report["unpaired_hops"].items():
        console.print(f"unpaired: {count} of {what}")
    return file.getvalue()


def _headline(report: Mapping[str, Any]) -> str:
    runs = ", ".join(report["run_ids"]) or "no run"
    lost = f", {report['dropped_count']} dropped" if report["dropped_count"] else ""
    cut = f", {report['unreadable_lines']} unreadable lines" if report["unreadable_lines"] else ""
    partial = f" ({report['partial_count']} {PARTIAL})" if report["partial_count"] else ""
    return (
        f"{runs}: {report['request_count']} requests{partial}, {report['event_count']} events of "
        f"{len(report['processes'])} processes{lost}{cut}"
    )


def _table(title: str, rows: list[Mapping[str, Any]], columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        numeric = column == "count" or column.endswith("_ms")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.3f}" if isinstance(value, float) else printable(str(value))
