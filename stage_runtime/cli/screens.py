"""What `omni up` shows: a live table on a terminal, plain lines anywhere else.

Here: words, colours and the two ways to show them. Not here: when things happen (`up`). Called by `up`.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from omnipipeline_spec.plan import CoordinatorPlan, PipelinePlan
from stage_runtime.processes import activity
from stage_runtime.processes.instances import ProcessView, StartupFailed

STYLES = {
    "ready": "green",
    "loading": "yellow",
    "registering": "yellow",
    "starting": "yellow",
    "restarting": "red",
    "failed": "bold red",
}
REFRESH_PER_S = 8
Views = Callable[[], Sequence[ProcessView]]


class Screen(Protocol):
    """Told of everything that a person may want to see."""

    def starting(self, plan: PipelinePlan, views: Views) -> None: ...

    def changed(self, view: ProcessView) -> None: ...

    def printed(self, process: str, line: str) -> None: ...

    def up(self, url: str) -> None: ...

    def failed(self, failure: StartupFailed) -> None: ...

    def draining(self) -> None: ...

    def over(self) -> None: ...


class Lines:
    """One line per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plan: PipelinePlan | None = None
        self._began = time.monotonic()

    def starting(self, plan: PipelinePlan, views: Views) -> None:
        self._plan = plan
        self._say(f"starting {plan.pipeline}: {_extent(plan)}")

    def changed(self, view: ProcessView) -> None:
        style = STYLES.get(view.state, "")
        pid = f" (pid {view.pid})" if view.pid is not None and view.state in ("starting", "ready") else ""
        detail = f": {view.message}" if view.message else ""
        self._say(Text.assemble((view.process, "bold"), " ", (view.state, style), detail, (pid, "dim")))

    def printed(self, process: str, line: str) -> None:
        self._say(Text.assemble((f"{process} | ", "dim"), Text.from_ansi(line)))

    def up(self, url: str) -> None:
        assert self._plan is not None
        self._say(f"up in {time.monotonic() - self._began:.1f} s")
        self._say(Text.assemble("\n", (self._plan.pipeline, "bold"), " answers at ", (url, "bold green"), "\n"))
        self._say(example(self._plan.coordinator, url))
        self._say(Text("\n^C stops it\n", style="dim"))

    def failed(self, failure: StartupFailed) -> None:
        where = f" (stage {failure.stage})" if failure.stage and failure.stage != failure.process else ""
        for line in failure.traceback.splitlines():
            self._say(Text.assemble((f"{failure.process} | ", "dim"), line))
        self._say(Text(f"{failure.process}{where} did not start: {failure.problem}", style="bold red"))

    def draining(self) -> None:
        self._say("stopping when the requests in flight are finished; ^C again stops now")

    def over(self) -> None:
        self._say("stopped")

    def _say(self, text: str | Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


class LiveTable(Lines):
    """A table of processes while they start, with the newest line of what each prints; all lines once they run."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
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

    def up(self, url: str) -> None:
        self._settle()
        super().up(url)

    def failed(self, failure: StartupFailed) -> None:
        self._live.stop()
        if not failure.traceback:
            for line in failure.tail:
                self.printed(failure.process, line)
        super().failed(failure)

    def over(self) -> None:
        self._live.stop()
        super().over()

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()

    def _settle(self) -> None:
        """Leave the table as it is now above what follows."""
        self._live.stop()
        self._console.print(table(self._views()))

    def _render(self) -> RenderableType:
        seconds = f" {time.monotonic() - self._began:.0f} s"
        self._spinner.update(text=Text(seconds, style="dim"))
        return Group(table(self._views(), self._newest), self._spinner)


@contextmanager
def choose(*, plain: bool) -> Iterator[Screen]:
    """The screen that fits standard output; the terminal is as it was afterwards."""
    console = Console(file=sys.stdout)
    if plain or not console.is_terminal:
        yield Lines(Console(file=sys.stdout, color_system=None if not console.is_terminal else "auto"))
        return
    screen = LiveTable(console)
    try:
        yield screen
    finally:
        screen.close()


def table(views: Sequence[ProcessView], newest: Mapping[str, str] = {}) -> Table:
    """Processes, what is in them, and how they are.

    newest: process -> its last line, shown until it is ready.
    """
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("PROCESS", "STAGES", "STATE", "", "PID"):
        drawn.add_column(heading, overflow="ellipsis", no_wrap=True)
    drawn.add_column("MEMORY", justify="right")
    for view in views:
        drawn.add_row(
            Text(view.process, style="bold"),
            Text(", ".join(view.stages), style="dim"),
            Text(view.state, style=STYLES.get(view.state, "")),
            _detail(view, newest.get(view.process, "")),
            "" if view.pid is None else str(view.pid),
            "" if view.pid is None else memory(activity.resident_bytes(view.pid)),
        )
    return drawn


def _detail(view: ProcessView, newest: str) -> Text:
    if view.state == "ready" or not newest:
        return Text(view.message)
    return Text.assemble(view.message, " " * bool(view.message), (Text.from_ansi(newest).plain, "dim"))


def memory(nbytes: int) -> str:
    """Such as ``312 MiB`` or ``1.4 GiB``."""
    mib = nbytes / (1 << 20)
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def example(plan: CoordinatorPlan, url: str) -> str:
    """A curl line that this pipeline answers."""
    if "chat" in plan.serves:
        message = {"role": "user", "content": "hello there"}
        return _post(f"{url}/v1/chat/completions", {"model": plan.model, "messages": [message]})
    if "speech" in plan.serves:
        body = {"model": plan.model, "voice": "default", "input": "hello there", "response_format": "wav"}
        return _post(f"{url}/v1/audio/speech", body) + " -o answer.wav"
    if "transcription" in plan.serves:
        return f"curl {url}/v1/audio/transcriptions -F model={shlex.quote(plan.model)} -F file=@question.wav"
    return _post(f"{url}/v1/pipeline", {"inputs": "hello there"})


def _post(url: str, body: object) -> str:
    text = msgspec.json.encode(body).decode()
    return f"curl {url} -H 'content-type: application/json' -d {shlex.quote(text)}"


def _extent(plan: PipelinePlan) -> str:
    stages = sum(len(unit.stages) for unit in plan.units)
    processes = sum(len(g.processes) * plan.replicas[unit.name] for unit in plan.units for g in unit.groups)
    return f"{_count(stages, 'stage')} in {_count(processes, 'process', 'es')}, and the coordinator"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
