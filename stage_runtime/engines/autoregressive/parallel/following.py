"""The engine of a TP stage's ranks 1..: computes what rank 0 orders. Requests, which rank 0 answers, are set aside."""

from __future__ import annotations

import threading
from threading import Event

from stage_runtime.engines import events
from stage_runtime.engines.autoregressive.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.parallel.ranks import RankLost, Ranks, follow
from stage_runtime.engines.base import Inbox, Outbox


class FollowingEngine:
    """`engines.base.Engine`."""

    ticks = 0
    takes_chunks = False
    takes_admin = False
    concurrency = 1

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        """Raises: RankLost: this rank cannot go on, which ends the instance."""
        threading.Thread(target=self._set_aside, args=(inbox, outbox), name="requests", daemon=True).start()
        try:
            follow(self._runner, self._ranks)
            stop.wait()  # rank 0 is drained first, and its engine with it
        except RankLost:
            if not stop.is_set():  # rank 0 may end first while all are stopped
                raise

    def _set_aside(self, inbox: Inbox, outbox: Outbox) -> None:
        while not inbox.closed:
            match inbox.get():
                case events.Start(work=work):
                    outbox.done(work, None, has_data=False)
                case _:
                    pass
