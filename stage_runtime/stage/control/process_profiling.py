"""Answers a coordinator's profiler messages for one stage process. It runs on the I/O thread; files are
another thread's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from stage_runtime.errors import ConfigurationError, describe
from stage_runtime.profiler.recording.session import NOT_RECORDING, STARTED, ProfileSession, ProfileSettings
from stage_runtime.wire.messages import Message, ProfilerRead, ProfilerReply, ProfilerStart, ProfilerStop


class ProcessProfiling:
    """Answers profiler messages for one process."""

    def __init__(
        self,
        session: ProfileSession,
        send: Callable[[str, Message], bool],
        loop: asyncio.AbstractEventLoop,
        notify: Callable[[ProfilerStart | ProfilerStop], None],
    ) -> None:
        """notify: passes the change to the engines."""
        self._session = session
        self._send = send
        self._loop = loop
        self._notify = notify
        self.handlers: Mapping[type, Callable[[str, Any], None]] = {
            ProfilerStart: lambda sender, message: self._do(sender, message.call_id, lambda: self._start(message)),
            ProfilerStop: lambda sender, message: self._do(sender, message.call_id, lambda: self._stop(message)),
            ProfilerRead: lambda sender, message: self._do(sender, message.call_id, lambda: self._read(message)),
        }

    def beat(self) -> None:
        """Called with every beat of the process."""
        if self._session.recording is not None:
            self._session.thread.submit(self._expire)

    def _expire(self) -> None:
        """Ends a run whose time is over, and tells the engines. The session's thread calls it."""
        run_id = self._session.expire()
        if run_id is not None:
            self._loop.call_soon_threadsafe(self._notify, ProfilerStop("", run_id))

    def _do(self, sender: str, call_id: str, work: Callable[[], dict[str, Any]]) -> None:
        """Carry it out on the session's thread and answer, whatever becomes of it."""
        received_ns = time.time_ns()

        def carry_out() -> None:
            answer: dict[str, Any]
            try:
                answer = work()
            except ConfigurationError as error:
                answer = {"error": str(error)}
            except Exception as error:  # the outermost: a profile must never end serving
                answer = {"error": describe(error)}
            self._loop.call_soon_threadsafe(reply, answer)

        def reply(answer: dict[str, Any]) -> None:
            sent_ns = time.time_ns()
            self._send(sender, ProfilerReply(call_id, received_ns, sent_ns, **answer))

        self._session.thread.submit(carry_out)

    def _start(self, message: ProfilerStart) -> dict[str, Any]:
        settings = ProfileSettings(
            run_id=message.run_id,
            event_dir=message.event_dir,
            torch_template=message.torch_template,
            config=message.config,
            max_seconds=message.max_seconds,
        )
        before = self._session.recording
        stages = self._session.start(settings)
        if before not in (None, self._session.recording):
            self._loop.call_soon_threadsafe(self._notify, ProfilerStop("", before))
        if STARTED in stages.values():
            self._loop.call_soon_threadsafe(self._notify, message)
        return {"stages": stages}

    def _stop(self, message: ProfilerStop) -> dict[str, Any]:
        stages = self._session.stop(message.run_id)
        if NOT_RECORDING not in stages.values():  # a trace that cannot be written is not a run that goes on
            self._loop.call_soon_threadsafe(self._notify, message)
        return {"stages": stages}

    def _read(self, message: ProfilerRead) -> dict[str, Any]:
        if not message.path:
            return {"files": self._session.files(message.run_id)}
        return {"data": self._session.read(message.run_id, message.path, message.offset)}
