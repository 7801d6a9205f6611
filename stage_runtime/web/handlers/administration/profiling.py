"""The profiler's routes: start, stop, list, fetch, report. It is on the admin port, behind the API keys.

Bodies, defaults and wildcards are in docs/profiling.md, "Over HTTP".
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.questions.profile_questions import FAILED
from stage_runtime.coordinator.questions.profile_runs import (
    PipelineProfiling,
    ProfileAnswer,
    Run,
    RunFile,
    check_config,
)
from stage_runtime.errors import ConfigurationError, InvalidRequest, RequestError
from stage_runtime.web.exchanges import threads
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.handlers.administration.profile_room import Room, RoomPart
from stage_runtime.web.reading import bodies

MAX_SECONDS: Final = 24 * 3600
PIECE: Final = 256 << 10
REPORT_S: Final = 300.0
COLLECTED_NBYTES: Final = 8 << 30  # of all answers that are sent now; /tmp of a pod may take four times that
FORMATS: Final = {
    "table": b"text/plain; charset=utf-8",
    "json": b"application/json",
    "html": b"text/html; charset=utf-8",
    "perfetto": b"application/json",
}


class StartBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /start_profile."""

    run_id: str | None = None
    trace_path_template: str | None = None
    event_dir: str | None = None
    enable_torch: bool = True
    config: dict[str, Any] | None = None
    max_seconds: int | None = None


class StartRequestBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /start_request_profile."""

    run_id: str | None = None
    event_dir: str | None = None
    max_seconds: int | None = None


class StopBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /stop_profile and /stop_request_profile."""

    run_id: str | None = None


class ProfilerRuns(msgspec.Struct):
    """The answer of GET /profiles."""

    runs: list[Run]


class Profiles:
    def __init__(self, profiling: PipelineProfiling) -> None:
        self._profiling = profiling
        self._room = Room(COLLECTED_NBYTES)

    async def start(self, exchange: Exchange) -> None:
        """POST /start_profile: a torch trace and events."""
        body = await bodies.read(exchange, _start_bodies)
        config = dict(body.config or {})
        _check_seconds(body.max_seconds)
        answer = await _as_request(
            lambda: self._profiling.start(
                run_id=body.run_id,
                event_dir=body.event_dir,
                template=body.trace_path_template,
                config=check_config(config),
                torch=body.enable_torch,
                max_seconds=body.max_seconds,
            )
        )
        await _reply(exchange, answer)

    async def start_requests(self, exchange: Exchange) -> None:
        """POST /start_request_profile: events only."""
        body = await bodies.read(exchange, _start_request_bodies)
        _check_seconds(body.max_seconds)
        answer = await _as_request(
            lambda: self._profiling.start(
                run_id=body.run_id,
                event_dir=body.event_dir,
                template=None,
                config={},
                torch=False,
                max_seconds=body.max_seconds,
            )
        )
        await _reply(exchange, answer)

    async def stop(self, exchange: Exchange) -> None:
        """POST /stop_profile and /stop_request_profile."""
        body = await bodies.read(exchange, _stop_bodies)
        await _reply(exchange, await _as_request(lambda: self._profiling.stop(body.run_id)))

    async def list(self, exchange: Exchange) -> None:
        """GET /profiles: the runs of this coordinator, newest first."""
        await exchange.reply(msgspec.json.encode(ProfilerRuns(self._profiling.runs())))

    async def archive(self, exchange: Exchange) -> None:
        """GET /profiles/{run_id}: all its files as a tar."""
        run_id = _run_id(exchange)
        async with _while_connected(exchange), self._collected(run_id) as folder:
            headers = [(b"content-disposition", f'attachment; filename="{run_id}.tar"'.encode())]
            await exchange.start(b"application/x-tar", headers)
            for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                await _write_member(exchange, path, f"{run_id}/{path.relative_to(folder)}")
            await exchange.write(bytes(2 * tarfile.BLOCKSIZE))
            await exchange.end()

    async def report(self, exchange: Exchange) -> None:
        """GET /profiles/{run_id}/report?format=json|html|table|perfetto. Made by a process of its own."""
        run_id, form = _run_id(exchange), _format(exchange)
        async with _while_connected(exchange), self._collected(run_id) as events:
            out = events.with_name("report")
            await _make_report(events, form, out)
            await exchange.start(FORMATS[form], [(b"content-length", str(out.stat().st_size).encode())])
            await _write_file(exchange, out)
            await exchange.end()

    @asynccontextmanager
    async def _collected(self, run_id: str) -> AsyncIterator[Path]:
        """All files of the run, in a folder here. One that cannot be fetched is replaced by a note beside it."""
        with tempfile.TemporaryDirectory(prefix="omni-profile-") as folder, self._room.part() as room:
            files = Path(folder, "files")
            files.mkdir()
            await self._collect(run_id, files, room)
            yield files

    async def _collect(self, run_id: str, folder: Path, room: RoomPart) -> None:
        for file in await self._profiling.files(run_id):
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                room.take(file.nbytes, free=shutil.disk_usage(folder).free)
                await self._fetch(run_id, file, path)
            except ConfigurationError as error:
                path.with_name(f"{path.name}.error.txt").write_text(f"{error}\n")

    async def _fetch(self, run_id: str, file: RunFile, path: Path) -> None:
        with path.open("wb") as kept:
            async for piece in self._profiling.content(run_id, file):
                await threads.call(kept.write, piece)


_start_bodies = msgspec.json.Decoder(StartBody)
_start_request_bodies = msgspec.json.Decoder(StartRequestBody)
_stop_bodies = msgspec.json.Decoder(StopBody)


async def _as_request(work: Callable[[], Awaitable[ProfileAnswer]]) -> ProfileAnswer:
    try:
        return await work()
    except ConfigurationError as error:
        raise InvalidRequest(str(error)) from None
    except RequestError as error:
        if error.code == "duplicate_request":
            raise RequestRefused(409, error.code, error.message, param="run_id") from None
        raise


async def _reply(exchange: Exchange, answer: ProfileAnswer) -> None:
    """200 with every stage's answer; 503 when the coordinator itself has failed, so that nothing runs."""
    failed = any(each.state == FAILED for each in answer.stages if each.stage == COORDINATOR)
    await exchange.reply(msgspec.json.encode(answer), status=503 if failed else 200)


def _check_seconds(seconds: int | None) -> None:
    if seconds is not None and not 1 <= seconds <= MAX_SECONDS:
        raise InvalidRequest(f"max_seconds: {seconds} is not in 1..{MAX_SECONDS}", param="max_seconds")


def _run_id(exchange: Exchange) -> str:
    return str(exchange.scope["path_params"]["run_id"])


def _format(exchange: Exchange) -> str:
    query = exchange.scope.get("query_string", b"").decode("latin-1")
    given = dict(part.partition("=")[::2] for part in query.split("&") if part)
    form: str = given.pop("format", "json")
    if given or form not in FORMATS:
        raise InvalidRequest(f"format: one of {', '.join(FORMATS)}; the only parameter", param="format")
    return form


async def _make_report(events: Path, form: str, out: Path) -> None:
    """Raises: RequestError: not_found: the run has no events; unavailable: it takes too long."""
    command = [sys.executable, "-P", "-m", "stage_runtime.profiler", str(events), "--format", form, "--out", str(out)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(REPORT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        raise RequestError("unavailable", f"the report takes longer than {REPORT_S:g} s: fetch the files") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise RequestError("not_found", errors.decode(errors="replace").strip()[-500:].replace(str(events), "the run"))


@asynccontextmanager
async def _while_connected(exchange: Exchange) -> AsyncIterator[None]:
    """The block ends when the client disconnects: files of gigabytes are fetched from stages and sent for it alone.

    Raises: RequestError: cancelled: it has disconnected.
    """
    try:
        async with asyncio.timeout(None) as block:
            exchange.watch(lambda: block.reschedule(0.0))
            yield
    except TimeoutError:
        if not block.expired():
            raise
        raise RequestError("cancelled", "the client disconnected") from None
    finally:
        exchange.unwatch()


async def _write_member(exchange: Exchange, path: Path, name: str) -> None:
    """One file as a tar has it."""
    facts = tarfile.TarInfo(name)
    facts.size, facts.mtime = path.stat().st_size, int(time.time())
    await exchange.write(facts.tobuf(tarfile.PAX_FORMAT))
    await _write_file(exchange, path)
    padding = -facts.size % tarfile.BLOCKSIZE
    if padding:
        await exchange.write(bytes(padding))


async def _write_file(exchange: Exchange, path: Path) -> None:
    with path.open("rb") as file:
        while piece := await threads.call(_piece, file):
            await exchange.write(piece)


def _piece(file: io.BufferedReader) -> bytes:
    return file.read(PIECE)
