"""Prefill's connector: computes the prompts that decode instances ask for, and ships their blocks chunk by chunk.

A prompt is a request of one token whose answer nobody reads. Its end is a chunk of its own, so that most of the blocks
are on their way while it is computed. Blocks are copied out in the order of steps, so a request may end, or lose its
blocks, as soon as it was computed. Only a reader that lags behind holds blocks, up to `KEPT_SHARE` of the pool, until
it has taken what was copied or its lease is over.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from torch import Tensor

from stage_runtime.engines.autoregressive.connectors import crossing
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.kv_connector import Post
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import AddedRows
from stage_runtime.errors import ProtocolError, describe
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import Room
from stage_runtime.kv_transfer.records import PieceHeader, PromptAsk
from stage_runtime.kv_transfer.rooms import OVER, KVManager, KVPoll, KVSender
from stage_runtime.profiler import events as profile
from stage_runtime.rules.autoregressive.requests import Request
from stage_runtime.rules.autoregressive.steps import Row
from stage_runtime.rules.kv.handover import Load

log = logging.getLogger(__name__)

KEPT_SHARE: Final = 0.5  # of the pool: so much may be kept for readers that lag behind
TAIL_SHARE: Final = 8  # an eighth of what is asked for: the blocks that nothing hides
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class _Kept(NamedTuple):
    """Blocks of a prompt that wait for the reader, each with a user of its own in the pool."""

    sender: KVSender
    header: PieceHeader
    blocks: list[int]


class PrefillConnector:
    """`KVConnector` and `KVSink`."""

    def __init__(
        self, core: EngineCore, manager: KVManager, *, post: Post, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._core = core
        self._manager = manager
        self._post = post
        self._senders: dict[str, KVSender] = {}  #: Senders of requests that are being computed, by the engine's names.
        self._came: dict[str, float] = {}  #: When each of them was asked for.
        self._names: dict[Room, tuple[str, KVSender]] = {}  #: Names of rooms that the other side has not ended.
        self._kept: deque[_Kept] = deque()
        self._copied = 0  #: Bytes that wait to be sent.
        self._work = ThreadPoolExecutor(1, thread_name_prefix="kv-prefill")  #: Prompts in order, checksums.
        self._work.submit(int)  # the thread starts now: one that had to start later might not
        self._loads = core.connect(self, post)
        manager.transport.attach(self)

    @property
    def kept_blocks(self) -> int:
        return sum(len(one.blocks) for one in self._kept)

    # --- KVSink: the transport's thread ---------------------------------------------------------------------------

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        self._work.submit(self._prepare, room, peer, record, tensors, self._clock())

    def arrived(self, room: Room, header: bytes, tensors: Sequence[Tensor]) -> None:
        raise ProtocolError("a prefill stage got a piece")

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        self._work.submit(self._post, partial(self._closed, room, reason))  # behind its ask

    def _prepare(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor], came: float) -> None:
        """Reads and checks a prompt that decode asks for. The thread for prompts calls it: steps go on meanwhile."""
        try:
            ask = records.decode_ask(record, tensors)
            if (apart := self._manager.layout.difference(ask.layout)) is not None:
                raise ProtocolError(f"the blocks of prefill and decode differ in {apart}")
            sender = KVSender(self._manager, peer, room, ask, records.prompt_digest(ask, tensors))
            request = _request(room, ask, tensors)
            made = self._core.preprocess_add_request(request)
        except Exception as error:
            self._manager.transport.close(room, describe(error))
            return
        self._post(partial(self._admit, sender, ask, request, made, came))

    # --- the engine's thread --------------------------------------------------------------------------------------

    def _admit(self, sender: KVSender, ask: PromptAsk, request: EngineCoreRequest, made: Request, came: float) -> None:
        name = request.request_id
        self._senders[name] = sender
        self._came[name] = came
        self._loads.notice(profile.KV_PREFILL_START, name, blocks=ask.end - ask.first)
        self._names[sender.room] = name, sender
        try:
            sender.init(ask.end - ask.first)
            made.tail = self._tail(ask.end - ask.first)
            self._core.add_request(request, made)
        except Exception as error:
            self._end(name, sender, describe(error))

    def _tail(self, blocks: int) -> int:
        """Tokens of an ask's last chunk; 0: as it comes. A further chunk costs a prompt of one chunk too much."""
        size = self._manager.layout.block_size
        whole = blocks * size > self._core.scheduler.limits.max_chunk
        return max(blocks // TAIL_SHARE, 1) * size if whole else 0

    def _closed(self, room: Room, reason: str | None) -> None:
        name, sender = self._names.get(room, ("", None))
        if sender is None:
            return
        self._end(name, sender, reason or "decode has all that it wants", tell=False)
        self._core.abort_requests([name])

    def _end(self, name: str, sender: KVSender, problem: str, *, tell: bool = True) -> None:
        """Nothing more is sent for it."""
        sender.fail(problem, tell=tell)
        self._forget(name)
        self._names.pop(sender.room, None)
        gone = [one for one in self._kept if one.sender is sender]
        self._kept = deque(one for one in self._kept if one.sender is not sender)
        for one in gone:
            self._core.scheduler.pool.release(one.blocks)

    def _forget(self, name: str) -> KVSender | None:
        """Nothing more is computed for it."""
        sender = self._senders.pop(name, None)
        if sender is not None:
            del self._came[name]
            self._loads.notice(profile.KV_PREFILL_END, name, complete=sender.poll() is KVPoll.Success)
        return sender

    # --- KVConnector ----------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: EngineCoreRequest, made: Request, computed: int, whole: int) -> int:
        return 0

    def update_state_after_alloc(self, load: Load, request: EngineCoreRequest) -> None: ...

    def load_finished(self, load: Load) -> None: ...

    def found_kv(self, row: Row) -> None:
        self._save(row, row.start)

    def save_kv(self, row: Row) -> None:
        self._save(row, row.start + row.count)

    def _save(self, row: Row, computed: int) -> None:
        """Send the blocks of a row's request that are full of its first ``computed`` tokens and were not sent."""
        sender = self._senders.get(row.request.id)
        if sender is None:
            return
        indices = sender.unsent(computed // self._manager.layout.block_size)
        if not indices:
            return
        blocks = [row.request.blocks[index] for index in indices]
        header = sender.send(indices, computed_s=self._clock() - self._came[row.request.id])
        piece = _Kept(sender, header, blocks)
        if self._copied < self._manager.args.max_inflight and not self._kept:
            self._copy(piece)
            return
        pool = self._core.scheduler.pool
        if self.kept_blocks + len(blocks) > pool.capacity * KEPT_SHARE:
            self._end(row.request.id, sender, "decode takes its blocks too slowly")
            self._core.aborts_queue.put(row.request.id)
            return
        pool.pin(blocks)
        self._kept.append(piece)

    def _copy(self, piece: _Kept) -> None:
        """The engine copies a piece's blocks before any later step can write into them."""
        nbytes = len(piece.blocks) * self._manager.block_nbytes
        self._copied += nbytes
        blocks, memory = list(piece.blocks), self._manager.transport.memory
        self._loads.counts["sent_blocks"] += len(blocks)
        self._loads.counts["sent_bytes"] += nbytes
        future = self._core.executor.call(lambda runner: runner.pages.export(blocks, memory(nbytes)))
        future.add_done_callback(lambda done: self._work.submit(self._ship, piece, nbytes, done))

    def _ship(self, piece: _Kept, nbytes: int, done: Future[Tensor]) -> None:
        """The thread for checksums sends a piece whose blocks are copied."""
        sent = partial(self._post, partial(self._sent, nbytes))
        try:
            piece.sender.ship(piece.header, done.result(), sent)
        except Exception as error:
            log.exception("blocks of room %s cannot be sent", piece.sender.room)
            sent()
            self._post(partial(self._failed, piece.sender, describe(error)))

    def _failed(self, sender: KVSender, problem: str) -> None:
        name, _sender = self._names.get(sender.room, ("", None))
        self._manager.transport.close(sender.room, problem)
        if name:
            self._end(name, sender, problem, tell=False)
            self._core.abort_requests([name])

    def _sent(self, nbytes: int) -> None:
        """The memory of a copy is free: copy the next blocks that wait."""
        self._copied -= nbytes
        while self._kept and self._copied < self._manager.args.max_inflight:
            piece = self._kept.popleft()
            self._copy(piece)
            self._core.scheduler.pool.release(piece.blocks)

    def request_finished(self, request: Request) -> None:
        sender = self._forget(request.id)
        if sender is not None and sender.poll() is not KVPoll.Success and sender.poll() not in OVER:
            self._end(request.id, sender, "the prompt was not computed to its end")

    def close(self) -> None:
        self._work.shutdown(cancel_futures=True)


def _request(room: Room, ask: PromptAsk, tensors: Sequence[Tensor]) -> EngineCoreRequest:
    """Raises: ValueError: the tensors are not those of the ask. The core checks what is in them."""
    rest = list(tensors[1:])
    embeds = rest.pop(0) if ask.embeds else None
    positions = rest.pop(0) if ask.positions else None
    return EngineCoreRequest(
        request_id=crossing.prefill_name(room),
        prompt_token_ids=tensors[0].tolist(),
        prompt_embeds=embeds,
        prompt_positions=positions,
        position_delta=ask.position_delta,
        added_rows=[AddedRows(one.layer, list(one.places), rows) for one, rows in zip(ask.added, rest, strict=True)],
        params=ONE_TOKEN,
        priority=ask.priority,
        cache_salt=ask.cache_salt,
        adapter=ask.adapter,
        adapter_digest=ask.adapter_digest,
    )
