"""Decode's connector: asks the prefill instance of a request's binding for the blocks of its prompt."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec
import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.connectors.hops import Hops
from stage_runtime.engines.autoregressive.connectors.watch import Watch
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.kv_connector import Failure, Local, Post
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import ROW
from stage_runtime.errors import ProtocolError
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import Room, Source
from stage_runtime.kv_transfer.records import AddedAfter, PieceHeader, PromptAsk
from stage_runtime.kv_transfer.rooms import KVManager, KVReceiver, new_key
from stage_runtime.rules.autoregressive.requests import Request
from stage_runtime.rules.autoregressive.steps import Row
from stage_runtime.rules.kv.handover import Load

PATIENCE_S: Final = 30.0  # without a block; the prompt is computed sooner here then
LOOK_S: Final = 5.0


class DecodeConnector:
    """`KVConnector` and `KVSink`."""

    def __init__(
        self,
        core: EngineCore,
        manager: KVManager,
        *,
        post: Post,
        source: Callable[[EngineCoreRequest], Source | None],
        hops: Hops,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """source: where a request's prompt may come from, as things are; None: it is computed here."""
        self._hops = hops
        self._probes: dict[Room, KVReceiver] = {}  #: Asks for one block, for the time that they take.
        self._manager = manager
        self._post = post
        self._source = source
        self._generations = itertools.count(1)
        self._rooms: dict[Room, tuple[str, KVReceiver]] = {}
        self._room_of: dict[str, Room] = {}
        self._progress: dict[Room, float] = {}  #: When each was asked for, or gave its last piece.
        #: The pieces of each room: seconds after the ask, and bytes.
        self._came: dict[Room, list[tuple[float, int]]] = {}
        self._asked_at: dict[Room, float] = {}
        self._clock = clock
        self._watch = Watch(self.look, LOOK_S, post=post)  #: Armed while rooms are open.
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="kv-check")
        self._checks.submit(int)  # the thread starts now, as that of `Watch`
        self._loads = core.connect(self, post)
        self._loads.least_tokens = lambda: hops.least_tokens
        manager.transport.attach(self)

    # --- KVConnector: the engine's thread -------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: EngineCoreRequest, made: Request, computed: int, whole: int) -> int:
        source = self._source(request)
        if source is not None and self._hops.meet(source.peer):
            self._probe(source)
        if whole - computed < self._hops.least_tokens:
            self._loads.compute_here(made.id, Local.SHORT)
            return 0
        if source is None:
            self._loads.compute_here(made.id, Local.UNBOUND)
            return 0
        return whole - computed

    def _room(self, source: Source) -> Room:
        return msgspec.structs.replace(source.room, generation=next(self._generations))

    def _probe(self, source: Source) -> None:
        """Ask for a block that nobody needs, in a room of a request that is here."""
        room = self._room(source)
        size = self._manager.layout.block_size
        ask = PromptAsk(key=new_key(), layout=self._manager.layout, first=0, end=1, cache_salt=new_key().hex())
        self._probes[room] = KVReceiver(self._manager, source.peer, room, ask, [torch.zeros(size, dtype=torch.int64)])
        self._progress[room] = self._asked_at[room] = self._clock()
        self._probes[room].init([0])
        self._arm()

    def _probed(self, room: Room) -> KVReceiver | None:
        """A probe's room is over. None: it is not a probe's."""
        receiver = self._probes.pop(room, None)
        if receiver is not None:
            del self._progress[room], self._asked_at[room]
        return receiver

    def update_state_after_alloc(self, load: Load, request: EngineCoreRequest) -> None:
        source = self._source(request)
        if source is None:
            self._post(partial(self._loads.fail, load.request_id, "its prefill instance is gone", Failure.LOST))
            return
        room = self._room(source)
        ask, tensors = self._ask(load, request)
        receiver = KVReceiver(self._manager, source.peer, room, ask, tensors)
        self._rooms[room] = load.request_id, receiver
        self._room_of[load.request_id] = room
        self._progress[room] = self._asked_at[room] = self._clock()
        self._came[room] = []
        receiver.init(load.missing)
        self._arm()

    def _arm(self) -> None:
        if self._progress:
            self._watch.arm()

    def look(self) -> None:
        """Give up the rooms that give nothing: a side that waits for another one must not wait for ever."""
        now = self._clock()
        for room, since in list(self._progress.items()):
            if now - since > PATIENCE_S:
                problem = f"no block has come for {PATIENCE_S:g} s"
                if (probe := self._probed(room)) is not None:
                    probe.fail(problem)
                    continue
                request_id, receiver = self._rooms[room]
                receiver.fail(problem)
                self._loads.fail(request_id, problem, Failure.SILENT)
        self._arm()

    def _ask(self, load: Load, request: EngineCoreRequest) -> tuple[PromptAsk, list[Tensor]]:
        count = len(load.hashes) * self._manager.layout.block_size
        tokens = list(request.prompt_token_ids[:count])
        tensors = [torch.tensor(tokens, dtype=torch.int64)]
        if rows := sum(token == ROW for token in tokens):
            tensors.append(request.prompt_embeds[:rows].detach().cpu().contiguous())
        if request.prompt_positions is not None:
            tensors.append(request.prompt_positions[:, :count].detach().cpu().contiguous())
        added = []
        for one in request.added_rows:
            places = tuple(place for place in one.places if place < count)
            if places:
                added.append(AddedAfter(one.layer, places))
                tensors.append(one.rows[: len(places)].detach().cpu().contiguous())
        ask = PromptAsk(
            key=new_key(),
            layout=self._manager.layout,
            first=load.first,
            end=len(load.hashes),
            embeds=bool(rows),
            positions=request.prompt_positions is not None,
            position_delta=request.position_delta,
            added=tuple(added),
            priority=request.priority,
            cache_salt=request.cache_salt,
            checksum=self._manager.checksum,
            adapter=request.adapter,
            adapter_digest=request.adapter_digest,
        )
        return ask, tensors

    def load_finished(self, load: Load) -> None:
        receiver = self._forget(load.request_id)
        if receiver is None:
            return
        if load.complete:
            receiver.complete()
        else:
            receiver.fail("decode computes the prompt itself")

    def found_kv(self, row: Row) -> None: ...

    def save_kv(self, row: Row) -> None: ...

    def request_finished(self, request: Request) -> None:
        receiver = self._forget(request.id)
        if receiver is not None:
            receiver.fail("the request has ended")

    def _forget(self, request_id: str) -> KVReceiver | None:
        room = self._room_of.pop(request_id, None)
        if room is None:
            return None
        del self._progress[room], self._asked_at[room], self._came[room]
        return self._rooms.pop(room)[1]

    def close(self) -> None:
        self._watch.close()
        self._checks.shutdown(cancel_futures=True)

    # --- KVSink: the transport's thread ---------------------------------------------------------------------------

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[Tensor]) -> None:
        raise ProtocolError("a decode stage was asked for a prompt")

    def arrived(self, room: Room, header: bytes, tensors: Sequence[Tensor]) -> None:
        self._checks.submit(self._check, room, header, tensors)

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        why = Failure.LOST if lost else Failure.DECLINED
        ended = partial(self._closed, room, reason or "the other side has ended the room", why)
        self._checks.submit(self._post, ended)  # behind the pieces before it

    def _check(self, room: Room, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Compares a piece with its checksum. The thread for checksums calls it: steps go on meanwhile."""
        try:
            found = records.decode_header(header)
            if found.checksum is not None and [found.checksum] != [records.checksum(found, one) for one in tensors]:
                raise ProtocolError("a piece whose checksum is another one")
        except Exception as error:
            self._post(partial(self._refuse, room, str(error)))
            return
        self._post(partial(self._accept, room, found, tensors))

    # --- the engine's thread again --------------------------------------------------------------------------------

    def _accept(self, room: Room, header: PieceHeader, tensors: Sequence[Tensor]) -> None:
        now = self._clock()
        request_id, receiver = self._rooms.get(room, ("", self._probes.get(room)))
        if receiver is None:
            return
        try:
            flat = receiver.accept(header, tensors)
        except ProtocolError as error:
            self._refuse(room, str(error))
            return
        after_s = now - self._asked_at[room]
        if self._probed(room) is not None:
            self._hops.note(after_s - header.computed_s)
            receiver.complete()
            return
        came = self._came[room]
        if not came:
            self._hops.note(after_s - header.computed_s)
        if header.first + header.count == receiver.end:
            self._loads.counts["hidden_bytes"] += sum(
                nbytes for before_s, nbytes in came if before_s <= header.computed_s
            )
        came.append((after_s, flat.numel()))
        self._progress[room] = now
        self._loads.fill(request_id, header.first, flat, header.count)

    def _refuse(self, room: Room, problem: str) -> None:
        """The peer sent something else than was asked for: nothing of the room is believed any more."""
        if (probe := self._probed(room)) is not None:
            probe.fail(problem)
            return
        request_id, receiver = self._rooms.get(room, ("", None))
        if receiver is not None:
            receiver.fail(problem)
            self._loads.fail(request_id, problem, Failure.REFUSED)

    def _closed(self, room: Room, reason: str, why: Failure) -> None:
        if (probe := self._probed(room)) is not None:
            probe.fail(reason, tell=False)
            return
        request_id, receiver = self._rooms.get(room, ("", None))
        if receiver is not None:
            receiver.fail(reason, tell=False)
            self._loads.fail(request_id, reason, why)
