"""Keys and values of prompts from outside of the engine: the connector's interface, and the loads that follow from it.

A connector says how many blocks of a prompt it can bring (another engine, a store), is given blocks, and brings their
bytes. Blocks are known by the hashes of their tokens, so the scheduler finds them as a prefix; a block that it does not
bring is computed here. Names are vLLM's where the thing is the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from stage_runtime.errors import describe
from stage_runtime.profiler import events as profile
from stage_runtime.rules.autoregressive.requests import Hold, Request, RequestStatus
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import Row
from stage_runtime.rules.kv.handover import Load, LoadStatus

if TYPE_CHECKING:
    from torch import Tensor

    from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
    from stage_runtime.engines.autoregressive.core.executors import Executor

log = logging.getLogger(__name__)

#: Names of counters: blocks sent to a peer or a store and received, and their bytes, the bytes of them that came while
#: the peer computed the rest of their prompt, and loads begun.
KV_COUNTS: Final = ("sent_blocks", "sent_bytes", "received_blocks", "received_bytes", "hidden_bytes", "loads")

Post = Callable[[Callable[[], None]], None]  #: Has a function called on the engine's thread soon; from any thread.
Notice = Callable[..., None]  #: The notice of a profiler's event: its name, the engine's name of a request, metadata.


class Local(StrEnum):
    """Why nobody was asked for a prompt."""

    SHORT = "short"  #: It lacks fewer tokens than are worth it.
    UNBOUND = "unbound"  #: No prefill instance is bound to the request, or known here.
    ABSENT = "absent"  #: The folder has none of its blocks.
    UNFIT = "unfit"  #: It grows by a stream, or wants something of each of its tokens.


class Failure(StrEnum):
    """Why blocks that were asked for did not come, so that the prompt was computed here."""

    LOST = "lost"  #: The prefill instance has died, or cannot be reached.
    DECLINED = "declined"  #: It has ended the room: it drains, has another layout, or its reader was too slow.
    SILENT = "silent"  #: No block came for a while.
    REFUSED = "refused"  #: Something else came than was asked for.
    UNREADABLE = "unreadable"  #: A file of the folder.
    ERROR = "error"  #: An error of this engine.


class KVConnector(Protocol):
    """All calls on the engine's thread; none may block, and only `update_state_after_alloc` may raise."""

    def get_num_new_matched_tokens(self, request: EngineCoreRequest, made: Request, computed: int, whole: int) -> int:
        """How many tokens after the first ``computed`` ones it can bring, at most ``whole`` less those.

        Both are at the ends of blocks, and so is the result; 0: the prompt is computed here.
        """

    def update_state_after_alloc(self, load: Load, request: EngineCoreRequest) -> None:
        """Blocks for `Load.missing` are there: begin to bring them, by `KVLoads.fill` and `KVLoads.fail`."""

    def load_finished(self, load: Load) -> None:
        """Nothing more is wanted for it; `Load.complete`: all has come and was written."""

    def found_kv(self, row: Row) -> None:
        """A step will compute this row. All before it is computed: what the cache had may be copied now, as below."""

    def save_kv(self, row: Row) -> None:
        """A step has computed a row. `row.request.blocks` hold it until this returns: copy by `Executor.call`."""

    def request_finished(self, request: Request) -> None:
        """It has ended: nothing is brought or saved for it any more. Its blocks are free after this returns."""

    def close(self) -> None: ...


class KVLoads:
    """Requests that wait for a connector. This runs on the engine's thread."""

    def __init__(self, scheduler: Scheduler, executor: Executor, connector: KVConnector, post: Post) -> None:
        self.connector = connector
        self.counts: Counter[str] = Counter()  #: Counts by the keys of `KV_COUNTS`.
        self.computed_here: Counter[Local | Failure] = Counter()  #: Prompts.
        self.least_tokens: Callable[[], int] = lambda: 0  #: Prompts that lack fewer are computed here.
        self.notice: Notice = lambda event, request_id, **metadata: None
        self._scheduler = scheduler
        self._executor = executor
        self._post = post
        self._requests: dict[str, tuple[EngineCoreRequest, Request]] = {}  #: That wait, by id.
        self._following: dict[str, list[str]] = {}  #: Those that wait for blocks of another load, by its id.
        scheduler.on_end = self._ended

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EngineCoreRequest, made: Request) -> None:
        """Give it to the scheduler: queued, or held while its prompt comes from afar. Raises: as `Scheduler.add`."""
        if request.hold is not None or made.id in self._scheduler:
            self._scheduler.add(made, request.hold)
            return
        try:
            self._scheduler.add(made, self._hold(request, made))
        except BaseException:
            self.forget(made.id)
            raise

    def _hold(self, request: EngineCoreRequest, made: Request) -> Hold | None:
        """Whether a request waits for its prompt to come from afar. None: not."""
        limits, params = self._scheduler.limits, request.params
        if made.open or made.feeds_itself or not limits.prefix_caching or params.prompt_logprobs is not None:
            self.compute_here(made.id, Local.UNFIT)
            return None
        size = limits.block_size
        hashes = self._wanted(made)
        found = len(self._scheduler.pool.find(hashes))
        if found == len(hashes):
            return None
        other = self._scheduler.loads.loader(hashes[found])
        if other is None:
            brought = self.connector.get_num_new_matched_tokens(request, made, found * size, len(hashes) * size)
            if brought < size:
                return None
            self._scheduler.loads.add(Load(made.id, hashes[: found + brought // size], -(-len(made.tokens) // size)))
        else:
            self._following.setdefault(other, []).append(made.id)
        self._requests[made.id] = request, made
        return Hold.REMOTE_KV

    def compute_here(self, request_id: str, why: Local | Failure) -> None:
        """Count a prompt that this engine computes."""
        self.computed_here[why] += 1
        self.notice(profile.KV_LOCAL, request_id, reason=str(why))

    def _wanted(self, made: Request) -> list[bytes]:
        """Hashes of the blocks that may come. The last token is computed here: the next one is sampled from it."""
        size = self._scheduler.limits.block_size
        return made.hash(size)[: (len(made.tokens) - 1) // size]

    def start(self) -> None:
        """Begin the loads for which there is room now."""
        if not self._requests:
            return
        for load in self._scheduler.loads.start(self._scheduler.running):
            request, _made = self._requests[load.request_id]
            if load.complete:
                self._finish(load)
                continue
            self.counts["loads"] += 1
            self.notice(profile.KV_LOAD_START, load.request_id, blocks=len(load.missing))
            try:
                self.connector.update_state_after_alloc(load, request)
            except Exception as error:  # such as a priority that no message can carry: this prompt is computed here
                self.fail(load.request_id, describe(error), Failure.ERROR)

    def fill(self, request_id: str, first: int, flat: Tensor, count: int) -> None:
        """Bytes of the blocks ``first .. first + count`` of a load have come, and are what they claim to be."""
        load = self._scheduler.loads.get(request_id)
        if load is None or load.status is not LoadStatus.LOADING:
            return
        self.counts["received_bytes"] += flat.numel()
        blocks = load.blocks[first : first + count]
        future = self._executor.call(lambda runner: runner.pages.load(blocks, flat))
        if future.done():
            self._filled(load, first, count, future)
        else:
            future.add_done_callback(lambda done: self._post(partial(self._filled, load, first, count, done)))

    def _filled(self, load: Load, first: int, count: int, done: Future[Any]) -> None:
        if self._scheduler.loads.get(load.request_id) is not load or load.status is not LoadStatus.LOADING:
            return
        try:
            done.result()
            self._scheduler.loads.fill(load, first, count)
        except Exception as error:
            self.fail(load.request_id, describe(error), Failure.ERROR)
            return
        if load.complete:
            self._finish(load)

    def fail(self, request_id: str, reason: str, why: Failure) -> None:
        """Nothing more comes for a load: what has not come is computed here. reason: for the log."""
        load = self._scheduler.loads.get(request_id)
        if load is None or load.status is LoadStatus.LOADED:
            return
        log.warning("request %s: its prompt is computed here: %s", request_id, reason)
        self.compute_here(request_id, why)
        self._finish(load, believed=why is not Failure.REFUSED)

    def _finish(self, load: Load, *, believed: bool = True) -> None:
        self._scheduler.loads.finish(load, believed=believed)
        self.counts["received_blocks"] += len(load.filled)
        self.notice(profile.KV_LOAD_END, load.request_id, blocks=len(load.filled), complete=load.complete)
        self.connector.load_finished(load)
        self._release(load.request_id)
        self._decide_again(load.request_id)
        self.start()

    def _release(self, request_id: str) -> None:
        _request, made = self._requests.pop(request_id)
        if made.state is RequestStatus.HELD:
            self._scheduler.release(request_id)

    def _decide_again(self, request_id: str) -> None:
        """Requests that waited for this one's blocks look for them elsewhere, or stop waiting."""
        for follower in self._following.pop(request_id, ()):
            if follower in self._requests:
                request, made = self._requests[follower]
                if self._hold(request, made) is None:
                    self._release(follower)

    def gauges(self) -> dict[str, int]:
        """The connector's values for `/metrics`, by the names of `metrics.catalog.KV`. Any thread may call this: single
        numbers are read.
        """
        return {
            "kv_loads_under_way": len(self._scheduler.loads),
            "kv_least_tokens": self.least_tokens(),
            "kv_received_tokens_total": self._scheduler.stats.received_tokens,
            **{f"kv_{name}_total": self.counts[name] for name in KV_COUNTS},
            **{f"kv_local_total.{why}": self.computed_here[why] for why in Local},
            **{f"kv_failed_total.{why}": self.computed_here[why] for why in Failure},
        }

    def found(self, rows: Sequence[Row]) -> None:
        """A step is about to compute these rows. Those whose request has one under way are left out: it may fail."""
        for row in rows:
            if row.start and row.request.in_flight == 1:
                self.connector.found_kv(row)

    def save(self, rows: Sequence[Row], failed: Callable[[str], bool]) -> None:
        """A step has computed these rows. Called before requests end by it."""
        for row in rows:
            if row.request.state is RequestStatus.RUNNING and not failed(row.request.id):
                self.connector.save_kv(row)

    def _ended(self, request: Request) -> None:
        self.connector.request_finished(request)
        self.forget(request.id)
        self._post(self.start)

    def forget(self, request_id: str) -> None:
        """A request is not there any more. Bytes that are being written into its
        blocks are written before a later step.
        """
        self._requests.pop(request_id, None)
        if self._scheduler.loads.end(request_id) is not None:
            self._post(partial(self._decide_again, request_id))
