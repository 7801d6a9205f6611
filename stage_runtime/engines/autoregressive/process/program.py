"""The program of one engine process, from its arguments ENDPOINT, INDEX, PARENT and NAME to its end.

It ends with its parent, whatever it computes at that moment. SIGTERM finishes what is under way, a second one aborts
it. SIGINT is the parent's business: a terminal sends it to both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from stage_runtime import diagnostics
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.expert_parallel.places import Place
from stage_runtime.engines.autoregressive.process import parents, titles
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    EngineFailed,
    EngineHello,
    EngineLoading,
    EngineReady,
    Init,
    identity,
)
from stage_runtime.engines.autoregressive.process.proc import EngineCoreProc
from stage_runtime.engines.making import bars
from stage_runtime.engines.making.resolving import resolve
from stage_runtime.engines.threads import ending
from stage_runtime.errors import ConfigurationError, PeerError, format_traceback
from stage_runtime.sockets import multipart

HANDSHAKE_S: Final = 60.0

Kind: TypeAlias = Callable[[Init], type[EngineCoreProc]]

log = logging.getLogger(__name__)


def main(kind: Kind) -> None:
    """kind: chooses the process's class by what the client has sent."""
    diagnostics.descriptor()
    ending.prepare()
    code = 1
    try:
        _serve(kind)
        code = 0
    finally:
        ending.exit_soon(code)


def _serve(kind: Kind) -> None:
    endpoint, index, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    titles.take(f"engine{index}:{sys.argv[4]}".rstrip(":"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parents.end_with(parent)
    logging.basicConfig(level=logging.WARNING, format=f"engine {index}: %(levelname)s %(name)s: %(message)s")
    context = multipart.SocketContext()
    handshake = context.connect("DEALER", endpoint, identity=identity(index))
    encode = msgspec.msgpack.encode
    try:
        handshake.send([encode(EngineHello(index, os.getpid()))])
        init = _receive(handshake)
        try:
            sending = threading.Lock()  # downloads have threads

            def loading(message: str, done: float, total: float, unit: str) -> None:
                with sending, contextlib.suppress(PeerError):
                    handshake.send([encode(EngineLoading(index, message, done, total, unit))])

            with bars.reported(loading):
                proc = _make(kind(init), init, index)
        except BaseException as error:
            handshake.send([encode(EngineFailed(index, format_traceback(error)))])
            raise
        stats = None if init.coordination is None else init.coordination.stats
        handshake.send([encode(EngineReady(index, proc.num_gpu_blocks, stats))])
    finally:
        handshake.close(linger_ms=multipart.LAST_WORDS_MS)
        context.close()
    _run(proc.proc)


class _Made:
    def __init__(self, proc: EngineCoreProc, num_gpu_blocks: int) -> None:
        self.proc = proc
        self.num_gpu_blocks = num_gpu_blocks


def _receive(handshake: multipart.FrameSocket) -> Init:
    poller = multipart.Poller(handshake)
    while (frames := handshake.receive()) is None:
        if not poller.wait(HANDSHAKE_S):
            raise TimeoutError("the client does not answer")
    return msgspec.msgpack.decode(frames[0], type=Init)


def _make(kind: type[EngineCoreProc], init: Init, index: int) -> _Made:
    coordination, kwargs = init.coordination, init.kwargs
    if coordination is not None and coordination.lockstep:
        kwargs = {**kwargs, "place": Place(index, coordination.size, coordination.rendezvous)}
    served: Any = resolve(init.factory, field="factory")(**kwargs)
    if not isinstance(served, Served):
        raise ConfigurationError(f"{init.factory} returned a {type(served).__name__}, no Served")
    proc = kind(served, init, engine_index=index)
    proc.start()
    return _Made(proc, served.num_gpu_blocks)


def _run(proc: EngineCoreProc) -> None:
    signals = 0

    def shut_down(number: int, frame: Any) -> None:
        nonlocal signals
        signals += 1
        proc.request_shutdown(drain=signals == 1)

    signal.signal(signal.SIGTERM, shut_down)
    try:
        proc.run_busy_loop()
    except BaseException:  # RankLost is not an Exception
        log.exception("the engine core failed")
        sys.exit(1)
