"""``python -m stage_runtime.web.sound.forkserver FD``: forks a codec process for each connection that it is handed.

It loads numpy and libsndfile once and never uses them, so a fork takes milliseconds and shares their memory. It has
one thread and opens no data: that makes the fork safe, and leaves nothing to attack. The coordinator, which has
threads, starts it by exec. FD is its end of a socket pair; when the other end is closed, however the coordinator
ended, it kills its process group: itself and all sessions. Called by `pool`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, NoReturn

#: numpy's BLAS starts threads when it is loaded, and no fork of a process with threads is safe.
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    os.environ.update(ONE_THREAD)
    from stage_runtime.web.sound import codec_session

    gc.freeze()  # a collection in a session would write to, and so copy, pages that all share
    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap()
        if control.fileno() not in ready:
            continue
        message, handed, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os.killpg(0, signal.SIGKILL)
        for fd in handed:
            if os.fork() == 0:
                for inherited in (control.fileno(), woken, wake):
                    os.close(inherited)
                signal.set_wakeup_fd(-1)
                _serve(codec_session.serve, fd)
            os.close(fd)


def _serve(serve: Callable[[socket.socket], None], fd: int) -> NoReturn:
    """Never returns: the frames above it on the stack belong to the fork server."""
    code = 1
    try:
        with contextlib.suppress(ConnectionError):
            serve(socket.socket(fileno=fd))
        code = 0
    except BaseException as error:
        print(f"codec process: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _reap() -> None:
    """Report sessions that ended with an error."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            print(f"codec process {pid} was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
