"""Standard output as `omni up` writes to it: a thread writes, so that a reader who pauses stops nothing else.

``| less``, a terminal after ^S and a program that does not read its pipe make a write wait. It would keep everything
waiting on the event loop: the children's output, and so the children, and ^C.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

HELD_NBYTES: Final = 4 << 20  # for a reader who pauses; what comes then is counted
AT_ONCE_NBYTES: Final = 1 << 16
FINISH_S: Final = 2.0  # at the end


class Output:
    """A text file, as far as `rich` needs one. No call waits, but for `finish`."""

    def __init__(self, descriptor: int, *, encoding: str = "utf-8", held_nbytes: int = HELD_NBYTES) -> None:
        self.encoding = encoding
        self._descriptor = descriptor
        self._held_nbytes = held_nbytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._nbytes = 0  #: Bytes of what waits and of what is being written.
        self._left_out = 0  #: Lines, since the last notice of them.
        self._leaving_out = False  #: It leaves text out until half of the room is free.
        self._error: OSError | None = None
        self._on_error: Callable[[], object] | None = None
        threading.Thread(target=self._run, name="output", daemon=True).start()

    @property
    def error(self) -> OSError | None:
        """Why nothing can be written any more."""
        return self._error

    def when_broken(self, act: Callable[[], object]) -> None:
        """Call ``act`` once when writing fails: now, if it has. Any thread may call this."""
        with self._changed:
            if self._error is None:
                self._on_error = act
                return
        act()

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, "replace")
        with self._changed:
            if self._error is not None:
                return len(text)
            room = self._held_nbytes - self._nbytes
            self._leaving_out = room < (self._held_nbytes // 2 if self._leaving_out else len(data))
            if self._leaving_out:
                self._left_out += text.count("\n")
            else:
                self._put(data)
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes what there is."""

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def finish(self, within_s: float = FINISH_S) -> bool:
        """Wait until all is written, ``within_s`` at most. Returns: whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._error is not None or not (self._nbytes or self._left_out), within_s
            )

    def _put(self, data: bytes) -> None:
        if self._left_out:
            notice = f"… {self._left_out} lines were not shown\n".encode(self.encoding, "replace")
            self._left_out = 0
            self._put(notice)
        self._waiting.append(data)
        self._nbytes += len(data)

    def _run(self) -> None:
        while True:
            data = self._next()
            try:
                self._write(data)
            except OSError as error:
                self._broken(error)
                return
            with self._changed:
                self._nbytes -= len(data)
                self._changed.notify_all()

    def _next(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._left_out)
            if not self._waiting:
                self._put(b"")
            taken = [self._waiting.popleft()]
            size = len(taken[0])
            while self._waiting and size + len(self._waiting[0]) <= AT_ONCE_NBYTES:
                size += len(self._waiting[0])
                taken.append(self._waiting.popleft())
            return b"".join(taken)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # whoever started us, or shares it with us, has set it so
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll()

    def _broken(self, error: OSError) -> None:
        with self._changed:
            self._error = error
            self._waiting.clear()
            self._changed.notify_all()
            act, self._on_error = self._on_error, None
        if act is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                act()


def standard() -> Output | None:
    """Standard output; None where it is not a file of the system's."""
    try:
        sys.stdout.flush()
        return Output(sys.stdout.fileno(), encoding=sys.stdout.encoding)
    except (AttributeError, ValueError):  # None, closed, or an object
        return None
