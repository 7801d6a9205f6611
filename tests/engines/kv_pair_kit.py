"""A prefill and a decode engine in one process, and a transport between them that loses, doubles and forges."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.connectors import layouts
from stage_runtime.engines.autoregressive.connectors.decode import DecodeConnector
from stage_runtime.engines.autoregressive.connectors.hops import Fixed, Hops
from stage_runtime.engines.autoregressive.connectors.prefill import PrefillConnector
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.model.digests import weights_digest
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import KVRooms, KVSink, Piece, Room, Source
from stage_runtime.kv_transfer.records import PieceHeader
from stage_runtime.kv_transfer.rooms import KVManager
from tests.engines.generation_kit import GREEDY, Answers, core, tiny_model

Ship = Callable[[Room, bytes, Sequence[Any]], None]


class Side:
    """One end of the transport: `kv_transfer.interface.KVRooms`."""

    def __init__(self, pair: Pair, name: str) -> None:
        self.pair = pair
        self.name = name
        self.sink: KVSink | None = None
        self.closes: list[tuple[Room, str | None]] = []

    def peer(self, request_id: str) -> str | None:
        return "prefill" if self.pair.bound else None

    def room(self, request_id: str, generation: int) -> Room | None:
        return Room("cc", request_id, 1, generation) if self.pair.bound else None

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def ask(self, room: Room, peer: str, record: bytes, tensors: Sequence[Any]) -> None:
        self.pair.asks.append((room, record, tensors))
        self.pair.opened.add(room)
        if self.pair.asking(room):
            assert self.pair.prefill.sink is not None
            self.pair.prefill.sink.asked(room, "decode", record, tensors)

    def ship(self, room: Room, piece: Piece) -> None:
        if room in self.pair.opened:
            self.pair.pieces.append((room, piece.header, [one.clone() for one in piece.tensors]))
            self.pair.shipping(room, piece.header, piece.tensors)
        if self.pair.takes:
            piece.sent()
        else:
            self.pair.untaken.append(piece)

    def close(self, room: Room, reason: str | None) -> None:
        self.closes.append((room, reason))
        if (reason is None and self.name == "prefill") or room not in self.pair.opened:
            return
        self.pair.opened.discard(room)
        other = self.pair.decode if self.name == "prefill" else self.pair.prefill
        assert other.sink is not None
        other.sink.closed(room, reason)

    def attach(self, sink: KVSink) -> None:
        self.sink = sink


class Engine(Answers):
    """A core that is stepped by its test, and what others have posted to it."""

    def __init__(self, made: EngineCore) -> None:
        super().__init__(made)
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def ask(self, name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **others: Any) -> None:
        super().ask(name, prompt, params, **others)

    def turn(self) -> bool:
        """Call what was posted, then step. Whether there was something to do."""
        did = False
        while True:
            try:
                self.posted.get_nowait()()
            except queue.Empty:
                break
            did = True
        if self.engine.has_work():
            outputs, _executed = self.engine.step_fn()
            for one in outputs:
                if one.request_id in self.tokens:
                    self.tokens[one.request_id] += one.new_token_ids
                    if one.finish is not None:
                        self.finish[one.request_id] = (one.finish, one.reason)
            return True
        return did


class Pair:
    """decode asks prefill for prompts that lack ``least`` tokens or more."""

    def __init__(
        self,
        kind: str = "llama",
        *,
        least: int = 4,
        decoding: dict[str, Any] | None = None,
        prefilling: dict[str, Any] | None = None,
        max_inflight: int = 1 << 20,
        layout: dict[str, Any] | None = None,
        hops: Hops | None = None,
        cores: tuple[EngineCore, EngineCore] | None = None,
        between: Callable[[Side], KVRooms] = lambda side: side,
        **limits: Any,
    ) -> None:
        """hops: instead of ``least``. layout: what differs in that of prefill.

        cores: of decode and prefill, instead of new ones. between: from a stage's transport to its engine's.
        """
        self.bound, self.takes, self.now = True, True, 0.0
        self.stopped: Engine | None = None  #: This side does nothing.
        self.untaken: list[Piece] = []
        self.asks: list[tuple[Room, bytes, Sequence[Any]]] = []
        self.pieces: list[tuple[Room, bytes, Sequence[Any]]] = []
        self.opened: set[Room] = set()
        self.asking: Callable[[Room], bool] = lambda room: True
        self.shipping: Ship = self.deliver
        self.decode, self.prefill = Side(self, "decode"), Side(self, "prefill")
        d, p = cores or (core(kind, **{**limits, **(decoding or {})}), core(kind, **{**limits, **(prefilling or {})}))
        self.d, self.p = Engine(d), Engine(p)
        self._weights = weights_digest(tiny_model(kind))
        self.decoder = DecodeConnector(
            self.d.engine,
            self._manager(self.d.engine, between(self.decode), max_inflight),
            post=self.d.posted.put,
            source=self.source,
            hops=hops or Fixed(least),
            clock=self.clock,
        )
        manager = self._manager(self.p.engine, between(self.prefill), max_inflight)
        if layout:
            manager.layout = msgspec.structs.replace(manager.layout, **layout)
        self.prefiller = PrefillConnector(self.p.engine, manager, post=self.p.posted.put, clock=self.clock)

    def source(self, request: EngineCoreRequest) -> Source | None:
        return Source("prefill", Room("cc", request.request_id.split("\0")[0], 1, 0)) if self.bound else None

    def clock(self) -> float:
        return self.now

    def _manager(self, engine: EngineCore, side: KVRooms, max_inflight: int) -> KVManager:
        runner: Any = engine.executor.call(lambda one: one).result()
        size = engine.scheduler.limits.block_size
        layout = layouts.layout_of(runner, Autoregressive(model="tiny", block_size=size), self._weights)
        args = msgspec.structs.replace(layouts.args_of(runner), max_inflight=max_inflight)
        return KVManager(args, side, layout)

    def deliver(self, room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        assert self.decode.sink is not None
        self.decode.sink.arrived(room, header, [one.clone() for one in tensors])

    def forge(self, **fields: Any) -> Ship:
        """Deliver each piece with another header, whose checksum is right unless it is among ``fields``."""

        def ship(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
            made = msgspec.structs.replace(msgspec.msgpack.decode(header, type=PieceHeader), **fields)
            if "checksum" not in fields:
                made = msgspec.structs.replace(made, checksum=records.checksum(made, tensors[0]))
            self.deliver(room, records.encode(made), tensors)

        return ship

    def cut(self, reason: str) -> None:
        """Both sides learn that the link is gone, or that the other one has died."""
        assert self.decode.sink is not None and self.prefill.sink is not None
        for room in list(self.opened):
            self.opened.discard(room)
            self.decode.sink.closed(room, reason)
            self.prefill.sink.closed(room, reason)

    def take_all(self) -> None:
        """The reader has caught up."""
        self.takes = True
        untaken, self.untaken = self.untaken, []
        for piece in untaken:
            piece.sent()

    def turn(self) -> None:
        """Threads are idle, then each side's posts and one step."""
        for pool in (self.prefiller._work, self.decoder._checks):  # the first gives the second its pieces
            pool.submit(lambda: None).result()
        for side in (self.p, self.d):
            if side is not self.stopped:
                side.turn()

    def run(self, *, turns: int = 2000) -> None:
        """Take turns until each request of decode has ended."""
        for _ in range(turns):
            if len(self.d.finish) == len(self.d.tokens):
                break
            self.turn()
        assert len(self.d.finish) == len(self.d.tokens), self.waiting()
        self.settle()

    def settle(self) -> None:
        for _ in range(6):
            self.turn()

    def waiting(self) -> str:
        return f"{[(one.id, one.state) for one in self.d.engine.scheduler]}, {[*self.d.engine.scheduler.loads]}"

    def close(self) -> None:
        self.d.engine.shutdown()
        self.p.engine.shutdown()

    @property
    def leaked(self) -> list[int]:
        """Blocks in use on each side."""
        return [one.engine.scheduler.pool.capacity - one.engine.scheduler.pool.free for one in (self.d, self.p)]

    @property
    def counts(self) -> dict[str, int]:
        """Decode's counts, and those of prompts that it has computed, by reason."""
        kv = self.d.engine.kv
        assert kv is not None
        return {**kv.counts, **{str(why): count for why, count in kv.computed_here.items()}}


def prompts(count: int, length: int = 30, first: int = 3) -> list[list[int]]:
    numbers = itertools.count(first)
    return [
        [(7 * at * at + 11 * at + 13 * number) % 250 for at in range(length)]
        for number in itertools.islice(numbers, count)
    ]
