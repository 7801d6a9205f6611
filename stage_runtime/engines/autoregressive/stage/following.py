"""The engine of a TP stage's ranks 1..: computes what rank 0 orders. Requests, which rank 0 answers, are set aside."""

from __future__ import annotations

import threading
from threading import Event

from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.stage.growing import FromStream
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import RankLost, Ranks, follow
from stage_runtime.engines.base import Inbox, Outbox
from stage_runtime.engines.events import Admin


class FollowingEngine:
    """`engines.base.Engine`."""

    ticks = 0
    takes_admin = True
    concurrency = 1
    places = 0

    def __init__(self, runner: ModelRunner, ranks: Ranks, *, takes_chunks: bool = False) -> None:
        """takes_chunks: others stream into the stage; what they send is rank 0's, too."""
        self.takes_chunks = takes_chunks
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
            event = inbox.get()
            if isinstance(event, Admin):
                event.reply(None)  # what it changes is rank 0's
            if isinstance(event, FromStream):  # the first of a request's; the others change nothing
                outbox.done(event.work, None, has_data=False)
