"""Profiles of a whole pipeline: every process is asked to record, its answer is awaited, its files are fetched.

Here: runs, their files, their ends. Not here: HTTP (`web.handlers.administration.profiling`), writing events
(`profiler`), the messages (`profile_questions`). This runs on the I/O thread. A process that dies, is silent or refuses
is named in the answer; serving goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.questions.clocks import Clocks
from stage_runtime.coordinator.questions.profile_questions import (
    FAILED,
    AskedProcess,
    Participants,
    Questions,
    StageState,
    clock_question,
    processes,
    state_of,
)
from stage_runtime.errors import ConfigurationError, RequestError, ValueRefused
from stage_runtime.profiler import paths
from stage_runtime.profiler.recording import torch_trace
from stage_runtime.profiler.recording.session import PIECE, STARTED, STOPPED, ProfileSession, ProfileSettings
from stage_runtime.wire import codec
from stage_runtime.wire.messages import (
    Message,
    ProfilerRead,
    ProfilerReply,
    ProfilerStart,
    ProfilerStop,
)

Made = TypeVar("Made")

log = logging.getLogger(__name__)

TOGETHER_S: Final = 10.0  # how long the coordinator waits with its own start for a process that does not answer
CLOCKS_S: Final = 60.0  # clocks without NTP drift apart by about 3 ms in this time
RUNS_KEPT: Final = 200
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class ProfileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a start or a stop."""

    run_id: str
    event_dir: str
    complete: bool  #: Every stage does as it was asked.
    stages: tuple[StageState, ...]
    torch_template: str | None = None


class ProfileLimits(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=False):
    """``profiling`` of the pipeline's resource, which changes without a restart."""

    enabled: bool = True
    max_seconds: int = 600  #: The limit of a torch trace that is not stopped.


class Run(msgspec.Struct, kw_only=True):
    """One profile, as this coordinator knows it."""

    run_id: str
    event_dir: str
    started_at: float  #: Seconds since the epoch.
    torch: bool
    recording: bool = True


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a run and where it is. ``name``: relative, and unique in the run."""

    name: str
    instance: str  #: Empty: on this process's disk.
    path: str
    nbytes: int
    rank: int = 0


class PipelineProfiling:
    """All profiles that this coordinator has started."""

    def __init__(
        self,
        session: ProfileSession | None,
        members: Participants,
        send: Callable[[str, Message], bool],
        loop: asyncio.AbstractEventLoop,
        clocks: Clocks,
    ) -> None:
        """session: of the coordinator's own process. clocks: gets what is measured."""
        self._given = session
        self._limits = ProfileLimits()
        self._members = members
        self._loop = loop
        self._questions = Questions(members, send, loop, clocks)
        self._measuring: asyncio.Task[Any] | None = None
        self._measured_at = loop.time()
        self._runs: dict[str, Run] = {}
        self._settings: ProfileSettings | None = None  #: Settings of the run that is recorded or is being started.
        self._ends_at: float | None = None  #: A time of the loop's clock. When the time of that run is over.
        self._changing = asyncio.Lock()  #: Held while a run is started or stopped.

    # --- what a client asks for ---------------------------------------------------------------------------------

    async def start(
        self,
        *,
        run_id: str | None,
        event_dir: str | None,
        template: str | None,
        config: Mapping[str, bool],
        torch: bool,
        max_seconds: int | None = None,
    ) -> ProfileAnswer:
        """Record on every process. max_seconds: None: the pipeline's own limit, with a torch trace.

        Raises: ConfigurationError: a field is wrong; nothing was started. RequestError: invalid_request (409 by
            `web`): another run is recorded.
        """
        if not self._limits.enabled:
            raise RequestError("unsupported_endpoint", "profiling is switched off: profiling.enabled is false")
        async with self._changing:
            self._forget_ended()
            run_id = paths.check_run_id(run_id) if run_id is not None else self._fresh_id()
            if self._session.recording is not None:
                raise RequestError("duplicate_request", f"run {self._session.recording!r} is recorded: stop it first")
            folder = str(paths.event_dir(self._session.root, run_id, event_dir))
            if torch:
                template = paths.check_template(self._session.root, template or paths.DEFAULT_TEMPLATE)
            settings = ProfileSettings(
                run_id=run_id,
                event_dir=paths.relative(self._session.root, folder),
                torch_template=paths.relative(self._session.root, template) if torch and template else None,
                config=config,
                max_seconds=_seconds(max_seconds, self._limits.max_seconds if torch else 0),
            )
            _check_carried(settings)
            self._settings, self._ends_at = settings, None
            # The coordinator starts last and stops first: a request that it has recorded is recorded in every stage.
            answers = self._loop.create_task(self._questions.ask_all(lambda call: _start_message(call, settings)))
            await asyncio.wait([answers], timeout=TOGETHER_S)
            # The coordinator's own process has no kernels: it records events, and takes no trace.
            own = await self._here(lambda: self._session.start(msgspec.structs.replace(settings, torch_template=None)))
            self._ends_at = self._loop.time() + settings.max_seconds if settings.max_seconds else None
            states = [self._own(own), *await answers]
            if states[0].state == STARTED:
                self._remember(Run(run_id=run_id, event_dir=folder, started_at=time.time(), torch=torch))
                await self._questions.measure_clocks()
            else:
                self._settings = self._ends_at = None
                stopped = await self._questions.ask_all(lambda call: ProfilerStop(call, run_id))
                # of those that could not start either, why they could not
                states[1:] = [each for each in states[1:] if each.state == FAILED] or stopped
            return ProfileAnswer(
                run_id=run_id,
                event_dir=folder,
                complete=all(each.state == STARTED for each in states),
                stages=tuple(states),
                torch_template=template if torch else None,
            )

    async def stop(self, run_id: str | None) -> ProfileAnswer:
        """Stop a run on every process; None: whatever is recorded.

        A run that this coordinator does not know may have been started by one that is gone: the stages are asked.
        Raises: RequestError: not_found: no run of this id is known, and no stage has stopped one.
        """
        async with self._changing:
            self._forget_ended()
            known = run_id if run_id is not None else self._session.recording
            run = self._runs.get(known) if known is not None else None
            if run_id is not None and run is None:
                paths.check_run_id(run_id)
            await self._questions.measure_clocks()
            own = self._own(await self._here(lambda: self._session.stop(run_id)))
            self._forget_ended()
            states = await self._questions.ask_all(lambda call: ProfilerStop(call, run_id))
            if run is not None:
                run.recording = False
            elif run_id is not None and all(each.state != STOPPED for each in states):
                raise RequestError("not_found", f"no profile run {run_id[:80]!r} is known here", param="run_id")
            return ProfileAnswer(
                run_id=run.run_id if run is not None else run_id or "",
                event_dir=run.event_dir if run is not None else "",
                complete=all(each.state == STOPPED for each in (own, *states)),
                stages=(own, *states),
            )

    def runs(self) -> list[Run]:
        """Newest first."""
        self._look_for_its_end()
        return list(reversed(self._runs.values()))

    async def files(self, run_id: str) -> list[RunFile]:
        """All files of a run, of every process that still lives. Raises: RequestError: not_found."""
        run = self._runs.get(run_id)
        if run is None:
            raise RequestError("not_found", f"no profile run {run_id[:80]!r} is known here", param="run_id")
        here = await self._here(lambda: _on_disk(Path(run.event_dir)))
        here |= dict(await self._here(lambda: self._session.files(run_id)))
        found = [RunFile(name=_name("", path), instance="", path=path, nbytes=size) for path, size in here.items()]
        members = dict(self._members())
        replies = await self._questions.replies(processes(members), lambda call: ProfilerRead(call, run_id))
        for process, reply in replies.items():
            if isinstance(reply, ProfilerReply):
                found += [
                    RunFile(
                        name=_name(f"{members[process.instance].group}-{process.name}", path),
                        instance=process.instance,
                        path=path,
                        nbytes=size,
                        rank=process.rank,
                    )
                    for path, size in reply.files
                    if path not in here  # of this machine: read already
                ]
        return found

    async def content(self, run_id: str, file: RunFile) -> AsyncIterator[bytes]:
        """The file in pieces, up to the size that it was listed with: one that is being written may grow for ever.

        Raises: ConfigurationError: it cannot be read.
        """
        offset = 0
        while offset < file.nbytes:
            piece = (await self._piece(run_id, file, offset))[: file.nbytes - offset]
            if not piece:
                return
            offset += len(piece)
            yield piece

    # --- what happens -------------------------------------------------------------------------------------------

    def replied(self, sender: str, message: ProfilerReply) -> None:
        """A process has answered."""
        self._questions.replied(sender, message)

    def lost(self, instance: str) -> None:
        """A process is gone: end the waits for its answers."""
        self._questions.lost(instance)

    def joined(self, instance: str) -> None:
        """A process that comes while a run is recorded takes part in it. Its answer has the offset of its clock."""
        self._look_for_its_end()
        settings = self._settings
        if settings is not None and self._ends_at is not None:
            left = math.ceil(self._ends_at - self._loop.time())
            settings = msgspec.structs.replace(settings, max_seconds=left) if left > 0 else None
        make = clock_question if settings is None else lambda call: _start_message(call, settings)
        member = self._members().get(instance)
        self._loop.create_task(self._questions.replies(processes({} if member is None else {instance: member}), make))

    def beat(self) -> None:
        """Called every now and then: a run ends when its time is over, here as everywhere. Clocks are measured."""
        now = self._loop.time()
        if now - self._measured_at >= CLOCKS_S and (self._measuring is None or self._measuring.done()):
            self._measured_at = now
            self._measuring = self._loop.create_task(
                self._questions.replies(processes(self._members()), clock_question)
            )
        if self._given is not None and self._given.recording is not None:
            self._given.thread.submit(self._given.expire)
        self._look_for_its_end()

    def limit(self, limits: ProfileLimits) -> None:
        """The pipeline's resource has changed."""
        self._limits = limits

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _session(self) -> ProfileSession:
        if self._given is None:
            raise RequestError("unsupported_endpoint", "this process takes no profiles")
        return self._given

    async def _piece(self, run_id: str, file: RunFile, offset: int) -> bytes:
        if not file.instance:
            return await self._here(lambda: _read(Path(file.path), offset))
        owner = AskedProcess(file.instance, file.rank)
        reply = await self._questions.call(
            owner, lambda call: ProfilerRead(call, run_id, path=file.path, offset=offset)
        )
        if not isinstance(reply, ProfilerReply):
            raise ConfigurationError(f"{file.name}: {reply}")
        if reply.error is not None:
            raise ConfigurationError(f"{file.name}: {reply.error}")
        return reply.data

    async def _here(self, work: Callable[[], Made]) -> Made:
        return await self._loop.run_in_executor(self._session.thread, work)

    def _look_for_its_end(self) -> None:
        """Notice that the recorded run has ended by its time limit; no message reports that."""
        if not self._changing.locked():
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Processes that join do not take part in a run that is not recorded here."""
        if self._settings is None or self._session.recording == self._settings.run_id:
            return
        if (run := self._runs.get(self._settings.run_id)) is not None:
            run.recording = False
        self._settings = self._ends_at = None

    def _fresh_id(self) -> str:
        """A run id made from the time, unique among the known runs."""
        name = time.strftime("run-%Y%m%d-%H%M%S")
        names = (name, *(f"{name}-{number}" for number in range(2, RUNS_KEPT + 2)))
        return next(each for each in names if each not in self._runs)

    def _remember(self, run: Run) -> None:
        self._runs.pop(run.run_id, None)  # of one that is recorded again, the last time counts
        self._runs[run.run_id] = run
        if len(self._runs) > RUNS_KEPT:
            del self._runs[next(iter(self._runs))]

    def _own(self, states: Mapping[str, str]) -> StageState:
        return state_of(COORDINATOR, COORDINATOR, AskedProcess(""), states[COORDINATOR])


def _start_message(call_id: str, settings: ProfileSettings) -> ProfilerStart:
    return ProfilerStart(
        call_id,
        settings.run_id,
        settings.event_dir,
        settings.torch_template,
        dict(settings.config),
        settings.max_seconds,
    )


def _check_carried(settings: ProfileSettings) -> None:
    """Raises: ConfigurationError: no process can be asked to record so: a path is too long once it is completed."""
    try:
        codec.check(_start_message("", settings))
    except ValueRefused as refused:
        raise ConfigurationError(f"{refused.path.removeprefix('ProfilerStart.')}: {refused.problem}") from None


def _seconds(requested_s: int | None, default_s: int) -> int:
    return default_s if requested_s is None else requested_s


def check_config(config: Mapping[str, Any]) -> dict[str, bool]:
    """The switches of the torch trace. Raises: ConfigurationError: an unknown one, or none of true and false."""
    for name, value in config.items():
        if name not in torch_trace.SWITCHES:
            raise ConfigurationError(f"config: {name[:80]!r} is not one of {', '.join(torch_trace.SWITCHES)}")
        if not isinstance(value, bool):
            raise ConfigurationError(f"config.{name}: must be true or false")
    return dict(config)


def _on_disk(folder: Path) -> dict[str, int]:
    """Files below a run's folder: of this process, and on one machine of every other one, dead ones too."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            found[str(path)] = path.stat().st_size
        except OSError:  # deleted meanwhile
            continue
    return found


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def _name(owner: str, path: str) -> str:
    """The name of a file in an archive: its origin and its own name. Safe, whatever a process reports of itself."""
    parts = (owner, *(part for part in Path(path).parts[-2:] if part != "events"))
    return "/".join(_UNSAFE.sub("_", part).lstrip(".") or "_" for part in parts if part)
