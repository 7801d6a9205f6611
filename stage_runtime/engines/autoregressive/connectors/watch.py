"""A look at what is waited for, again and again: a side that waits for another one must not wait for ever.

Called by `decode` and `folder`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stage_runtime.engines.autoregressive.core.kv_connector import Post


class Watch:
    """Has a function called on the engine's thread a while after each `arm`.

    Its thread starts with it: at the limit of threads a later one might not, and a wait would never be given up.
    """

    def __init__(self, look: Callable[[], None], every_s: float, *, post: Post) -> None:
        """look: arms it again, while something is waited for."""
        self._look = look
        self._every_s = every_s
        self._post = post
        self._armed = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="kv-watch", daemon=True).start()

    def arm(self) -> None:
        """Something is waited for. Any thread may call this, also while it is armed."""
        self._armed.set()

    def close(self) -> None:
        self._closed.set()
        self._armed.set()

    def _run(self) -> None:
        while self._armed.wait() and not self._closed.wait(self._every_s):
            self._armed.clear()
            self._post(self._look)
