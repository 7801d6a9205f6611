"""``omni top``: the graph of a running pipeline with its queues, busy stages and rates, again every second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omnipipeline_spec import consoles
from stage_runtime.cli import options
from stage_runtime.cli.running.server import CoordinatorClient, server, server_options

WIDTH_WITHOUT_TERMINAL: Final = 120
BAR: Final = 10  # columns of a queue or of busy places
WITH_BARS: Final = 110  # columns of the terminal; in a narrower one the numbers stand alone
GAP: Final = 1  # columns between two of the table
STAGE: Final = 12  # columns that a stage's name gets before its targets get any
TARGETS: Final = 10  # columns with which the targets are shown at all
NUMBERS: Final = ("READY", "WAITING", "RUNNING", "PER s", "QUEUE ms", "RUN ms", "BUSY")  # BUSY goes first, READY last
ARROWS: Final = {"stream": "⇢", "kv": "⇉"}
PREFIX: Final = "omnipipeline_"
KV: Final = "engine_kv_"

#: (name without prefix, the stage or outcome) -> value; of a stage's reasons ``name.reason``, too.
Series = dict[tuple[str, str], float]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline at one moment."""

    at: float  #: Monotonic.
    status: Mapping[str, Any]
    series: Series


@click.command("top")
@click.option("--every", type=options.SECONDS, default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Show one interval and end.")
@server_options
def command(every: float, once: bool, **which: Any) -> None:
    """Show the graph of a running pipeline: what waits, what runs, how many requests a second, how long they take."""
    with server(**which) as client:
        console = consoles.console(width_elsewhere=WIDTH_WITHOUT_TERMINAL)
        if once or not console.is_terminal:
            samples = _samples(client, every)
            before = next(samples)
            console.print(draw(before, next(samples), width=console.width))
            return
        _show(client, console, every)


def _show(client: CoordinatorClient, console: Console, every: float) -> None:
    samples = _samples(client, every)
    before = next(samples)
    with Live(draw(before, before, width=console.width), console=console, screen=True, auto_refresh=False) as live:
        try:
            for now in samples:
                live.update(draw(before, now, width=console.width), refresh=True)
                before = now
        except KeyboardInterrupt:
            return


def _samples(client: CoordinatorClient, every: float) -> Iterator[Sample]:
    while True:
        status = client.json("/status")
        yield Sample(at=time.monotonic(), status=status, series=parse(client.get("/metrics").decode()))
        time.sleep(every)


def parse(text: str) -> Series:
    """The samples of Prometheus' text that are shown here: those with at most a stage or an outcome as label,
    summed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" in sample.labels or not sample.name.startswith(PREFIX):
                continue
            name, labels = sample.name.removeprefix(PREFIX), sample.labels
            key = name, labels.get("stage") or labels.get("outcome") or ""
            found[key] = found.get(key, 0.0) + sample.value
            if "stage" in labels and "reason" in labels:
                one = f"{name}.{labels['reason']}", key[1]
                found[one] = found.get(one, 0.0) + sample.value
    return found


class Columns(msgspec.Struct, frozen=True):
    """How wide each column is: 0 for one that does not fit."""

    stage: int
    targets: int
    numbers: dict[str, int]
    bar: int

    @property
    def left_out(self) -> list[str]:
        """The headings of columns that are not shown."""
        hidden = [name for name in NUMBERS if not self.numbers[name]]
        return ["TO", *hidden] if not self.targets else hidden


def columns(stages: Sequence[str], targets: Sequence[str], *, width: int) -> Columns:
    """Numbers are shown whole or not at all; names get the rest and are cut with a sign."""
    bar = BAR if width >= WITH_BARS else 0
    numbers = {name: max(len(name), 7) for name in NUMBERS}
    numbers |= {"READY": 5, "PER s": 6, "BUSY": 5}
    numbers |= dict.fromkeys(("WAITING", "RUNNING"), bar + 6 if bar else 7)
    longest, most_targets = (max(map(len, (*each, heading))) for each, heading in ((stages, "STAGE"), (targets, "TO")))
    for name in reversed(NUMBERS):
        if _taken(numbers) + min(longest, STAGE) <= width:
            break
        numbers[name] = 0
    room = max(width - _taken(numbers), 1)
    stage = min(longest, room)
    if room - min(longest, STAGE) - GAP >= TARGETS:
        stage = min(longest, max(room - GAP - most_targets, STAGE))
        return Columns(stage, min(most_targets, room - GAP - stage), numbers, bar)
    return Columns(stage, 0, numbers, bar)


def _taken(numbers: Mapping[str, int]) -> int:
    return sum(GAP + each for each in numbers.values() if each)


def draw(before: Sample, now: Sample, *, width: int) -> RenderableType:
    """One row a stage, in the order of the graph; rates and times are those of the interval."""
    edges = [tuple(edge) for edge in now.status["edges"]]
    stages = ordered(now.status["stages"], edges)
    targets = [_targets(stage, edges) for stage in stages]
    widths = columns(stages, targets, width=width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for heading, columns_wide in (("STAGE", widths.stage), ("TO", widths.targets)):
        if columns_wide:
            table.add_column(heading, no_wrap=True, overflow="ellipsis", width=columns_wide)
    for heading, columns_wide in widths.numbers.items():
        left = bool(widths.bar) and heading in ("WAITING", "RUNNING")
        if columns_wide:
            table.add_column(heading, no_wrap=True, justify="left" if left else "right", width=columns_wide)
    for stage, to in zip(stages, targets, strict=True):
        numbers = _numbers(before, now, stage, widths.bar)
        table.add_row(
            Text(stage, style="bold" if now.series.get(("stage_running", stage)) else ""),
            *([Text(to, style="dim")] if widths.targets else []),
            *(cell for heading, cell in numbers.items() if widths.numbers[heading]),
        )
    shown: list[RenderableType] = [_headline(before, now), Text(), table]
    shown += [_transfers(before, now, stage) for stage in stages if (KV + "loads_total", stage) in now.series]
    if widths.left_out:
        shown.append(Text(f"a wider terminal also shows {', '.join(widths.left_out)}", style="dim"))
    return Group(*shown)


def _numbers(before: Sample, now: Sample, stage: str, bar: int) -> dict[str, Text]:
    """The numbers by heading, in the order of `NUMBERS`."""
    done = _grown(before, now, "stage_run_seconds_count", stage)
    run_s = _grown(before, now, "stage_run_seconds_sum", stage)
    queue_s = _grown(before, now, "stage_queue_seconds_sum", stage)
    waiting, running = (int(now.series.get((f"stage_{name}", stage), 0)) for name in ("waiting", "running"))
    busy, ready = now.series.get(("stage_busy_ratio", stage)), _ready(now.status, stage)
    cells = (
        Text(str(ready), style="" if ready else "bold red"),
        _bar(waiting, "yellow", bar),
        _bar(running, "green", bar),
        Text(_rate(done, now.at - before.at)),
        Text(_mean_ms(queue_s, done)),
        Text(_mean_ms(run_s, done)),
        Text("-" if busy is None or not ready else f"{100 * busy:.0f} %"),
    )
    return dict(zip(NUMBERS, cells, strict=True))


def _transfers(before: Sample, now: Sample, stage: str) -> Text:
    """A line of an engine whose blocks cross, or are kept: bytes of the interval, prompts since its start."""
    seconds = now.at - before.at

    def moved(way: str) -> str:
        grown = {unit: _grown(before, now, f"{KV}{way}_{unit}_total", stage) for unit in ("blocks", "bytes")}
        return f"{_rate(grown['blocks'], seconds)} blocks/s ({_rate(grown['bytes'] / 1e6, seconds)} MB/s) {way}"

    def count(name: str) -> int:
        return int(now.series.get((KV + name, stage), 0))

    def reasons(name: str) -> str:
        start = f"{KV}{name}."
        found = {
            key.removeprefix(start): int(value)
            for (key, of), value in now.series.items()
            if of == stage and value and key.startswith(start)
        }
        return f" ({', '.join(f'{value} {reason}' for reason, value in found.items())})" if found else ""

    line = Text(f"{stage} KV: ", style="dim")
    line.append(f"{moved('sent')}, {moved('received')}")
    if received := count("received_bytes_total"):
        line.append(f", {100 * count('hidden_bytes_total') / received:.0f} % of all while prefill computed")
    line.append(f"; prompts: {count('loads')} under way, {count('loads_total')} asked")
    if least := count("least_tokens"):
        line.append(f" from {least} tokens on")
    line.append(f", {count('local_total')} computed here{reasons('local_total')}")
    if failed := count("failed_total"):
        line.append(f", {failed} failed{reasons('failed_total')}", style="red")
    if (KV + "leases", stage) in now.series:
        line.append(f"; leases: {count('leases')} held, {count('leases_renewed_total')} renewed")
        line.append(
            f", {count('leases_expired_total')} expired", style="red" if count("leases_expired_total") else "dim"
        )
    return line


def ordered(stages: Sequence[str], edges: Sequence[tuple[str, ...]]) -> list[str]:
    """Sources before their targets; else as they come."""
    left, placed = list(stages), list[str]()
    while left:
        free = [one for one in left if not any(edge[1] == one and edge[0] in left for edge in edges)]
        placed += free or left
        left = [one for one in left if one not in placed]
    return placed


def _headline(before: Sample, now: Sample) -> Text:
    seconds = now.at - before.at
    outcomes = {key[1]: _grown(before, now, *key) for key in now.series if key[0] == "requests_total"}
    failed = sum(count for outcome, count in outcomes.items() if outcome not in ("completed", "cancelled"))
    header = Text.assemble(
        (now.status["pipeline"], "bold"),
        f"  {now.status['in_flight']} in flight  {_rate(outcomes.get('completed', 0), seconds)} completed/s",
    )
    if failed:
        header.append(f"  {_rate(failed, seconds)} failed/s", style="red")
    if not now.status["complete"]:
        header.append(f"  missing: {', '.join(now.status['missing_groups'])}", style="bold red")
    return header


def _targets(stage: str, edges: Sequence[tuple[str, ...]]) -> str:
    targets = [f"{ARROWS.get(kind, '→')} {target}" for source, target, kind in edges if source == stage]
    return ", ".join(targets) or "→ client"


def _ready(status: Mapping[str, Any], stage: str) -> int:
    return sum(one["ready"] and stage in one["stages"] for one in status["instances"])


def _grown(before: Sample, now: Sample, name: str, label: str) -> float:
    return now.series.get((name, label), 0.0) - before.series.get((name, label), 0.0)


def _rate(count: float, seconds: float) -> str:
    if seconds <= 0:
        return "-"
    rate = count / seconds
    return f"{rate:.1f}" if rate < 1000 else f"{rate:.0f}"


def _mean_ms(seconds: float, count: float) -> str:
    """The mean as text: at most seven columns, up to a week."""
    if count <= 0:
        return "-"
    mean_ms = 1000 * seconds / count
    return f"{mean_ms:.2f}" if mean_ms < 10_000 else f"{mean_ms / 1000:.0f} s"


def _bar(count: int, style: str, most: int) -> Text:
    """The number, and behind it a mark for each, up to ``most``; 0: the number alone."""
    if not most:
        return Text(str(count), style=style if count else "")
    return Text.assemble(f"{count:>4} ", ("▪" * min(count, most), style), "+" if count > most else "")
