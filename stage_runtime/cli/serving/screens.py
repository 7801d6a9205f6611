"""The screens of `omni up`: a live table on a terminal, plain lines anywhere else.

Here: words, colours and the two ways to show them. Not here: when things happen (`up`). Called by `up`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Protocol, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from omnipipeline_spec import consoles
from omnipipeline_spec.types.errors import printable
from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime.cli.serving import standard_output
from stage_runtime.cli.serving.standard_output import Output
from stage_runtime.processes.supervision import activity
from stage_runtime.processes.supervision.instances import ProcessView
from stage_runtime.processes.supervision.progress import LoadedShare, LoadingLines
from stage_runtime.processes.supervision.startup_failures import StartupFailed

STYLES = {
    "ready": "green",
    "loading": "yellow",
    "registering": "yellow",
    "starting": "yellow",
    "ending": "red",
    "restarting": "red",
    "failed": "bold red",
}
REFRESH_PER_S = 8
WIDEST_NAME = 22  # columns of a process's name, so that 80 are enough for all the rest
NAME_END = 8  # of them for its end, which distinguishes ranks and replicas: ``_tp3.12``
WIDEST_STAGES = 28
BAR_COLUMNS = 12
MARGIN_ROWS = 4  # of a terminal, for what is not a process: the headings, the spinner, the lines around them
Views = Callable[[], Sequence[ProcessView]]


class Screen(Protocol):
    """Receives everything that a person may want to see."""

    def starting(self, plan: PipelinePlan, views: Views) -> None: ...

    def note(self, line: str) -> None: ...

    def changed(self, view: ProcessView) -> None: ...

    def printed(self, process: str, line: str) -> None: ...

    def up(self, url: str, curl: str) -> None: ...

    def failed(self, failure: StartupFailed) -> None: ...

    def draining(self) -> None: ...

    def over(self) -> None: ...

    def finish(self) -> None:
        """Wait a moment until all is shown."""

    @property
    def broken(self) -> OSError | None:
        """Why nothing can be shown any more."""

    def when_broken(self, act: Callable[[], object]) -> None:
        """Call ``act`` once when that happens: now, if it has. Any thread may call this."""


class LineScreen:
    """One line per event."""

    def __init__(self, console: Console, output: Output | None = None) -> None:
        """output: what ``console`` writes to, if that has a thread of its own."""
        self._console = console
        self._output = output
        self._plan: PipelinePlan | None = None
        self._began = time.monotonic()
        self._stopping = False
        self._lines = LoadingLines()

    def starting(self, plan: PipelinePlan, views: Views) -> None:
        self._plan = plan
        self._say(f"starting {plan.pipeline}: {_extent(plan)}")

    def note(self, line: str) -> None:
        self._say(Text.assemble(("note: ", "yellow"), line))

    def changed(self, view: ProcessView) -> None:
        if self._stopping and view.state == "draining":
            return  # all of them do, and each says when it has stopped
        style = STYLES.get(view.state, "")
        pid = f" (pid {view.pid})" if view.pid is not None and view.state in ("starting", "ready") else ""
        if not self._lines.is_due(view.process, view.message, view.share):
            return
        detail = f": {view.detail}" if view.detail else ""
        self._say(Text.assemble((view.process, "bold"), " ", (view.state, style), detail, (pid, "dim")))

    def printed(self, process: str, line: str) -> None:
        self._say(Text.assemble((f"{process} | ", "dim"), _styled(line)))

    def up(self, url: str, curl: str) -> None:
        assert self._plan is not None
        self._say(f"up in {time.monotonic() - self._began:.1f} s")
        self._say(Text.assemble("\n", (self._plan.pipeline, "bold"), " answers at ", (url, "bold green"), "\n"))
        self._say(curl)
        self._say(Text("\n^C stops it\n", style="dim"))

    def failed(self, failure: StartupFailed) -> None:
        where = f" (stage {failure.stage})" if failure.stage and failure.stage != failure.process else ""
        self._explain(failure)
        self._say(Text(f"{failure.process}{where} did not start: {failure.problem}", style="bold red"))

    def _explain(self, failure: StartupFailed) -> None:
        """The traceback, unless the process has logged it as well: then it was printed above."""
        lines = failure.traceback.splitlines()
        logged = {line.strip() for line in failure.tail}  # what a log record quotes is indented
        if not lines or lines[-1].strip() not in logged:
            self._quote(failure.process, lines)

    def _quote(self, process: str, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(Text.assemble((f"{process} | ", "dim"), line))

    def draining(self) -> None:
        self._stopping = True
        self._say("stopping when the requests in flight are finished; ^C again stops now")

    def over(self) -> None:
        self._say("stopped")

    def finish(self) -> None:
        if self._output is not None:
            self._output.finish()

    @property
    def broken(self) -> OSError | None:
        return None if self._output is None else self._output.error

    def when_broken(self, act: Callable[[], object]) -> None:
        if self._output is not None:
            self._output.when_broken(act)

    def _say(self, text: str | Text) -> None:
        self._console.print(text, soft_wrap=True)


class LiveTable(LineScreen):
    """A table of processes while they start, with the newest line of what each prints; all lines once they run."""

    def __init__(self, console: Console, output: Output | None = None) -> None:
        super().__init__(console, output)
        self._views: Views = tuple
        self._newest: dict[str, str] = {}
        self._spinner = Spinner("dots", style="yellow")
        self._live = Live(
            console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self._render, transient=True
        )

    def starting(self, plan: PipelinePlan, views: Views) -> None:
        super().starting(plan, views)
        self._views = views
        self._live.start()

    def changed(self, view: ProcessView) -> None:
        if not self._live.is_started:
            super().changed(view)

    def printed(self, process: str, line: str) -> None:
        if self._live.is_started:
            self._newest[process] = line
        else:
            super().printed(process, line)

    def up(self, url: str, curl: str) -> None:
        self._settle()
        super().up(url, curl)

    def failed(self, failure: StartupFailed) -> None:
        self._live.stop()
        super().failed(failure)

    def _explain(self, failure: StartupFailed) -> None:
        """Nothing of it has been shown yet; what it printed last, when it ended without output."""
        self._quote(failure.process, failure.traceback.splitlines() if failure.reported else failure.tail)

    def over(self) -> None:
        self._live.stop()
        super().over()

    def finish(self) -> None:
        """Give the terminal back."""
        self._live.stop()
        super().finish()

    def _settle(self) -> None:
        """Leave the table as it is now above what follows."""
        self._live.stop()
        self._console.print(table(self._views()))

    def _render(self) -> RenderableType:
        seconds = f" {time.monotonic() - self._began:.0f} s"
        self._spinner.update(text=Text(seconds, style="dim"))
        rows = max(self._console.height - MARGIN_ROWS, 2)
        return Group(table(self._views(), self._newest, rows=rows), self._spinner)


@contextmanager
def choose(*, plain: bool) -> Iterator[Screen]:
    """The screen that fits standard output; the terminal is as it was afterwards."""
    output = standard_output.standard()
    file = cast(IO[str], sys.stdout if output is None else output)
    console = consoles.console(file=file)
    screen: Screen
    if plain or not console.is_terminal:
        screen = LineScreen(
            consoles.console(file=file, color_system=None if not console.is_terminal else "auto"), output
        )
    else:
        screen = LiveTable(console, output)
    try:
        yield screen
    finally:
        screen.finish()


def table(views: Sequence[ProcessView], newest: Mapping[str, str] = {}, *, rows: int | None = None) -> RenderableType:
    """Processes, what is in them, and how they are.

    80 columns cut stages and messages, never a name's end, a state, a pid or an amount of memory.
    newest: process -> its last line, shown until it is ready. rows: the most that fit; those that wait come first.
    """
    left_out: Sequence[ProcessView] = ()
    if rows is not None and len(views) > rows:
        waiting_first = sorted(views, key=lambda view: view.state == "ready")
        views, left_out = waiting_first[: rows - 1], waiting_first[rows - 1 :]
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    drawn.add_column("PROCESS", no_wrap=True)
    drawn.add_column("STAGES", max_width=WIDEST_STAGES)
    drawn.add_column("STATE", no_wrap=True)
    drawn.add_column("")
    drawn.add_column("PID", no_wrap=True)
    drawn.add_column("MEMORY", no_wrap=True, justify="right")
    for view in views:
        drawn.add_row(
            Text(shortened(view.process), style="bold"),
            _cut(Text(", ".join(view.stages), style="dim")),
            Text(view.state, style=STYLES.get(view.state, "")),
            _detail(view, newest.get(view.process, "")),
            "" if view.pid is None else str(view.pid),
            "" if view.pid is None else memory(activity.resident_bytes(view.pid)),
        )
    if not left_out:
        return drawn
    states = Counter(view.state for view in left_out)
    return Group(drawn, Text("and " + ", ".join(f"{n} {state}" for state, n in states.items()), style="dim"))


def shortened(name: str) -> str:
    """A process's name without its middle, when it is a long one."""
    return name if len(name) <= WIDEST_NAME else f"{name[: WIDEST_NAME - NAME_END - 1]}…{name[-NAME_END:]}"


def _cut(text: Text) -> Text:
    """The text cut to one line, as long as its column. (A column that does not wrap would not give any room away.)"""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _detail(view: ProcessView, newest: str) -> RenderableType:
    """The message of a process, with a bar where a share is known, else with the newest line of its output."""
    if view.share is not None:
        return _bar(view.message, view.share)
    if view.state == "ready" or not newest:
        return _cut(Text(view.message))
    plain = "".join(c if c.isprintable() else " " for c in _styled(newest).plain)
    return _cut(Text.assemble(view.message, " " * bool(view.message), (plain, "dim")))


def _styled(line: str) -> Text:
    """A line of a process with the colours that it has chosen."""
    try:
        return Text.from_ansi(line)
    except ValueError:  # a colour's number of thousands of digits
        return Text(printable(line))


def _bar(message: str, share: LoadedShare) -> RenderableType:
    """The message is cut where it does not fit, the share never."""
    row = Table.grid(padding=(0, 1))
    known = share.total > 0
    if known:
        row.add_column(width=BAR_COLUMNS, no_wrap=True)
    row.add_column(no_wrap=True)
    row.add_column()
    bar = [ProgressBar(total=share.total, completed=share.done)] if known else []
    row.add_row(*bar, Text(str(share)), _cut(Text(message, style="dim")))
    return row


def memory(nbytes: int) -> str:
    """Such as ``312 MiB`` or ``1.4 GiB``."""
    mib = nbytes / (1 << 20)
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def _extent(plan: PipelinePlan) -> str:
    stages = sum(len(unit.stages) for unit in plan.units)
    processes = sum(len(g.processes) * plan.replicas[unit.name] for unit in plan.units for g in unit.groups)
    return f"{_count(stages, 'stage')} in {_count(processes, 'process', 'es')}, and the coordinator"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
