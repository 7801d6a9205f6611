"""One codec process: serves one session on one connection, within limits that the kernel holds, and ends with it.

Here: the limits, the loop, the calls into libsndfile. Not here: who forks it (`forkserver`), who asks (`pool`).
libsndfile, libmp3lame and libopus work on what strangers made. A crash, a loop or a large allocation in them stays in a
process that belongs to one request.
"""

from __future__ import annotations

import math
import resource
import signal
import socket
from typing import Final

import soundfile

from stage_runtime.web.sound import codec_messages
from stage_runtime.web.sound.codec_messages import (
    Close,
    CodecReplies,
    CodecRequests,
    EncodedBytes,
    Measure,
    Measured,
    Open,
    Unencodable,
    Write,
)
from stage_runtime.web.sound.codecs import encoding, headers
from stage_runtime.web.sound.codecs.samples import Flat

MEMORY_NBYTES: Final = 1 << 30  # of address space; without any sound the process has about 0.1 GiB
LIFE_CPU_S: Final = 3600  # of one session: an hour of speech as mp3 takes half a minute


def serve(connection: socket.socket) -> None:
    """Answer until the other end is closed."""
    limit()
    session = _CodecSession()
    while (request := _receive(connection)) is not None:
        begin_call(codec_messages.CALL_S)
        reply = session.answer(request)
        end_call()
        if reply is not None:
            for part in codec_messages.frame(reply):
                connection.sendall(part)


class _CodecSession:
    def __init__(self) -> None:
        self._encoder: encoding.Encoder | None = None

    def answer(self, request: CodecRequests) -> CodecReplies | None:
        try:
            return self._answer(request)
        except soundfile.LibsndfileError as error:
            return Unencodable(f"libsndfile: {error.error_string}")

    def _answer(self, request: CodecRequests) -> CodecReplies | None:
        match request:
            case Open(format=name, whole=whole):
                if name:
                    self._encoder = encoding.Whole(name) if whole else encoding.encoder(name)
                return None
            case Measure(data=data):
                return Measured(headers.duration_s(bytes(data)))
            case Write():
                assert self._encoder is not None
                fields = (request.dtype, request.frames, request.channels, request.sample_rate, request.data)
                return EncodedBytes(self._encoder.write(Flat(*fields)))
            case Close():
                assert self._encoder is not None
                return EncodedBytes(self._encoder.close())


def limit() -> None:
    """Memory, life time, files. The limits of one call are set anew for each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIFE_CPU_S, LIFE_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    for number in (signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)  # the kernel ends the process, wherever its C code is


def begin_call(limit_s: float) -> None:
    """Has the kernel end this process after ``limit_s`` of wall time, or of processor time, from now."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = min(LIFE_CPU_S, math.ceil(usage.ru_utime + usage.ru_stime + limit_s))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, LIFE_CPU_S))


def end_call() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _receive(connection: socket.socket) -> CodecRequests | None:
    """The next request; None at the end, and where a request is torn off in its middle."""
    head = _exactly(connection, codec_messages.LENGTH.size)
    body = _exactly(connection, *codec_messages.LENGTH.unpack(head)) if head else None
    return codec_messages.REQUESTS.decode(body) if body else None


def _exactly(connection: socket.socket, nbytes: int) -> bytearray | None:
    buffer = bytearray(nbytes)
    view, got = memoryview(buffer), 0
    while got < nbytes:
        count = connection.recv_into(view[got:])
        if not count:
            return None
        got += count
    return buffer
