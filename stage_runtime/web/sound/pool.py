"""Codec processes, as the coordinator sees them: one for each sound that is encoded, ready in advance.

Here: the fork server's life, sessions and their time limits. Not here: what runs in those processes (`codec_session`,
`forkserver`), what the bytes mean (`formats`). Made by `processes.coordinator_process`, used by the routes.

An encoder keeps its state from a sound's first sample to its last, so a process belongs to one request: when it dies,
by its library's abort or by a limit, no other request notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Final, TypeVar

import msgspec

from stage_runtime.errors import UNDECODABLE, RequestError
from stage_runtime.web.sound import codec_messages
from stage_runtime.web.sound.codec_messages import (
    Close,
    CodecReply,
    CodecRequest,
    EncodedBytes,
    Measure,
    Measured,
    Open,
    Unencodable,
    Write,
)
from stage_runtime.web.sound.codecs import samples
from stage_runtime.wire.values import Audio

SPARES: Final = 2  # sessions that are forked ahead: a sound's first piece does not wait for a fork
REFILL_S: Final = 0.1  # a fork takes a processor for milliseconds; the sound's first piece goes first
REPLY_S: Final = codec_messages.CALL_S + 5.0  # the process ends itself at CALL_S; this is for one that cannot
END_S: Final = 5.0
TRIES: Final = 3  # a spare, or the fork server, may have died since it was made

Answer = TypeVar("Answer", bound=CodecReply)
log = logging.getLogger(__name__)


class CodecPool:
    """Sessions with codec processes. It runs on the event loop's thread; open it with ``async with``.

    spares: sessions that are forked ahead. reply_s: after so long without an answer a process is given up.
    """

    def __init__(self, *, spares: int = SPARES, reply_s: float = REPLY_S) -> None:
        self.reply_s = reply_s
        self._wanted = spares
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._spares: list[socket.socket] = []
        self._closed = False

    async def __aenter__(self) -> CodecPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for spare in self._spares:
            spare.close()
        self._spares.clear()
        if self._control is not None:
            self._control.close()  # the fork server kills all sessions and itself
        if self._server is not None:
            await asyncio.to_thread(self._server.wait, END_S)

    def warm(self) -> None:
        """Start the fork server and the spares now, so that the first sound does not wait for them."""
        with contextlib.suppress(OSError):
            while len(self._spares) < self._wanted and not self._closed:
                self._spares.append(self._connect())

    @property
    def pid(self) -> int | None:
        """The pid of the fork server, while it is thought to run."""
        return None if self._server is None else self._server.pid

    @contextlib.contextmanager
    def encoder(self, format: str, *, whole: bool = False) -> Iterator[EncodingSession]:
        """An encoder into ``format``, which is one of `formats.FORMATS`; its process ends with the block."""
        if format:
            self.warm()
        made = EncodingSession(self, format, whole)
        try:
            yield made
        finally:
            made.close()

    async def duration_s(self, data: bytes) -> float | None:
        """The duration of an uploaded file; None if libsndfile does not know the format or crashed on it."""
        with self.encoder("") as session:
            try:
                return (await session.ask(Measured, Measure(memoryview(data)))).seconds
            except RequestError as error:
                log.warning("the length of an upload of %d bytes is unknown: %s", len(data), error.message)
                return None

    def take(self) -> socket.socket:
        """A connection to a fresh codec process.

        Raises: OSError: no process can be started.
        """
        taken = self._spares.pop() if self._spares else self._connect()
        asyncio.get_running_loop().call_later(REFILL_S, self.warm)
        return taken

    def _connect(self) -> socket.socket:
        for _ in range(TRIES):
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._running(), [b"+"], [theirs.fileno()])
                except (BrokenPipeError, ConnectionResetError):
                    ours.close()
                    self._lost()
                    continue
                except OSError:
                    ours.close()
                    raise
            ours.setblocking(False)
            return ours
        raise ConnectionResetError("the codec fork server ends as soon as it is started")

    def _running(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", "stage_runtime.web.sound.forkserver", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a group of its own, which it kills when we are gone
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._control = ours
        return ours

    def _lost(self) -> None:
        """The fork server is gone. The sessions that it forked go on."""
        server = self._server
        if self._control is not None:
            self._control.close()
        self._control = self._server = None
        if server is not None:
            log.warning("the codec fork server has ended (%s); starting another", server.poll())


class EncodingSession:
    """One sound on its way into one file. Not for two tasks at once."""

    def __init__(self, pool: CodecPool, format: str, whole: bool) -> None:
        self._pool = pool
        self._format = format
        self._whole = whole
        self._connection: socket.socket | None = None
        self._stage: str | None = None  #: The stage that made the sound, for errors.
        self._frames = 0

    @property
    def empty(self) -> bool:
        """All that was written has no sample."""
        return not self._frames

    async def write(self, audio: Audio, *, stage: str | None = None) -> bytes:
        """The bytes of the file that are known now.

        Raises: RequestError: stage_failed: no sound, or the codec died of it. unavailable: no process can be had.
        """
        self._stage = stage
        sound = samples.flat(audio, stage=stage)
        self._frames += sound.frames
        made = [
            (
                await self.ask(
                    EncodedBytes, Write(block.dtype, block.frames, block.channels, block.sample_rate, block.data)
                )
            ).data
            for block in sound.blocks(codec_messages.BLOCK_NBYTES)
        ]
        return made[0] if len(made) == 1 else b"".join(made)

    async def finish(self) -> bytes:
        """The rest of the file, or all of it.

        Raises: RequestError: as `write`; stage_failed, too, when all pieces together had no sample.
        """
        if not self._frames:
            raise samples.no_sound(self._stage)
        return (await self.ask(EncodedBytes, Close())).data

    async def ask(self, expected: type[Answer], request: CodecRequest) -> Answer:
        """Raises: RequestError: as `write`."""
        try:
            async with asyncio.timeout(self._pool.reply_s):
                connection = self._connection or await self._open()
                reply = await _exchange(connection, request)
        except TimeoutError:
            raise self._died(f"did not answer within {self._pool.reply_s:g} s") from None
        except OSError:
            raise self._died("died") from None
        except UNDECODABLE:
            raise self._died("answers what is not a reply") from None
        if isinstance(reply, Unencodable):
            raise RequestError("stage_failed", f"omni.Audio: {reply.problem}", stage=self._stage)
        if not isinstance(reply, expected):
            raise self._died("answers another question")
        return reply

    def close(self) -> None:
        """Let the process end. One that is in a call ends within `messages.CALL_S`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _open(self) -> socket.socket:
        """A process of our own. A spare may have died since it was forked; then nothing is lost yet."""
        opening = b"".join(codec_messages.frame(Open(self._format, self._whole)))
        for _ in range(TRIES):
            try:
                self._connection = self._pool.take()
                await asyncio.get_running_loop().sock_sendall(self._connection, opening)
            except OSError as error:
                log.warning("no codec process: %s", error)
                self.close()
            else:
                return self._connection
        raise RequestError("unavailable", "no codec process can be started; the coordinator's log has the reason")

    def _died(self, how: str) -> RequestError:
        self.close()
        what = f"{self._format} encoder" if self._format else "decoder"
        return RequestError("stage_failed", f"omni.Audio: the {what}'s process {how}", stage=self._stage)


async def _exchange(connection: socket.socket, request: CodecRequest) -> CodecReply:
    loop = asyncio.get_running_loop()
    for part in codec_messages.frame(request):
        await loop.sock_sendall(connection, part)
    (nbytes,) = codec_messages.LENGTH.unpack(await _exactly(connection, codec_messages.LENGTH.size))
    if nbytes > codec_messages.MAX_NBYTES:
        raise msgspec.ValidationError(f"a reply of {nbytes} bytes")
    reply: CodecReply = codec_messages.REPLIES.decode(await _exactly(connection, nbytes))
    return reply


async def _exactly(connection: socket.socket, nbytes: int) -> bytearray:
    loop = asyncio.get_running_loop()
    buffer = bytearray(nbytes)
    view, got = memoryview(buffer), 0
    while got < nbytes:
        count = await loop.sock_recv_into(connection, view[got:])
        if not count:
            raise ConnectionResetError("the codec process has ended")
        got += count
    return buffer
