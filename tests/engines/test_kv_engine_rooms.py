"""Rooms of engines in processes of their own: messages as sockets carry them, and what engines leave that end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from stage_runtime.engines.autoregressive.connectors import crossing
from stage_runtime.engines.autoregressive.connectors.crossing import ToEngine, ToStage
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.messages.serial import MsgpackDecoder, MsgpackEncoder
from stage_runtime.engines.autoregressive.stage.engine_rooms import UNKNOWN, EngineRooms
from stage_runtime.errors import PeerError, ProtocolError
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import KVSink, Piece, Room, Source
from stage_runtime.kv_transfer.layout import KVLayout
from stage_runtime.kv_transfer.records import PromptAsk
from tests.engines.generation_kit import GREEDY, alone
from tests.engines.kv_pair_kit import Pair, Side, prompts

ROOM = Room("cc", "r", 1, 0)
BLOCK = torch.arange(300, dtype=torch.uint8)


def carried(message: Any, kind: Any) -> Any:
    return MsgpackDecoder(kind).decode([bytes(frame) for frame in MsgpackEncoder().encode(message)])


class Now:
    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> object:
        return callback(*arguments)


class Engines:
    """`RoomClient` of engines in this process."""

    def __init__(self, count: int = 1) -> None:
        self.on_kv: Callable[[int, ToStage], None] = lambda rank, message: None
        self.on_engine_end: Callable[[int], None] = lambda rank: None
        self.engines: dict[int, crossing.CrossingRooms] = {}
        self.chosen: list[int] = []
        self.prompts: list[tuple[Any, ...]] = []  #: Prompts for which an engine was chosen.
        self.draining = False
        for rank in range(count):
            self.start(rank)

    def start(self, rank: int) -> None:
        self.engines[rank] = crossing.CrossingRooms(lambda message: self.on_kv(rank, carried(message, ToStage)))

    def end(self, rank: int) -> None:
        del self.engines[rank]
        self.on_engine_end(rank)

    def choose_engine(self, tokens: Sequence[int], *beside: str) -> int:
        self.prompts.append((list(tokens), *beside))
        if not self.engines:
            raise ValueError("no engine is left")
        self.chosen.append(sorted(self.engines)[len(self.chosen) % len(self.engines)])
        return self.chosen[-1]

    def send_kv(self, rank: int, message: ToEngine) -> None:
        if rank not in self.engines:
            raise PeerError("it is gone")
        self.engines[rank].take(carried(message, ToEngine), draining=self.draining)


class Stage:
    """`KVTransport` that notes what it is told."""

    def __init__(self) -> None:
        self.attempt: int | None = 1  #: The attempt of the request; None: it is not known.
        self.asks: list[Room] = []
        self.shipped: list[tuple[Room, Piece]] = []
        self.closes: list[tuple[Room, str | None]] = []
        self.sink: KVSink

    def peer(self, request_id: str) -> str | None:
        return "p"

    def room(self, request_id: str, generation: int) -> Room | None:
        return None if self.attempt is None else Room("cc", request_id, self.attempt, generation)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def ask(self, room: Room, peer: str, record: bytes, tensors: Sequence[Any]) -> None:
        self.asks.append(room)

    def ship(self, room: Room, piece: Piece) -> None:
        self.shipped.append((room, piece))

    def close(self, room: Room, reason: str | None) -> None:
        self.closes.append((room, reason))

    def attach(self, sink: KVSink) -> None:
        self.sink = sink


class Came:
    """`KVSink` of an engine."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[Any]) -> None:
        self.given.append(("asked", room, peer, record, [one.tolist() for one in tensors]))

    def arrived(self, room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        self.given.append(("arrived", room, header, [one.tolist() for one in tensors]))

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        self.given.append(("closed", room, reason, lost))


def joined(role: str, engines: int = 2) -> tuple[Stage, Engines, EngineRooms, list[Came]]:
    stage, client, sinks = Stage(), Engines(engines), [Came() for _ in range(engines)]
    rooms = EngineRooms(stage, client, role)
    rooms.attach(Now())
    for rank, sink in enumerate(sinks):
        client.engines[rank].attach(sink)
    return stage, client, rooms, sinks


def between(side: Side) -> crossing.CrossingRooms:
    client = Engines()
    EngineRooms(side, client, side.name).attach(Now())
    return client.engines[0]


def test_prompts_are_answered_through_engine_processes_as_in_one() -> None:
    pair = Pair(between=between, blocks=24, max_requests=6)
    asked = prompts(6, 33)
    for index, prompt in enumerate(asked):
        pair.d.ask(f"r{index}", prompt)
    pair.run()
    assert [pair.d.tokens[f"r{index}"] for index in range(6)] == [alone("llama", prompt, 12) for prompt in asked]
    assert pair.counts["received_blocks"] >= 6 * 7
    assert (pair.leaked, pair.opened) == ([0, 0], set())
    pair.close()


def test_an_abort_through_engine_processes_frees_both_sides() -> None:
    pair = Pair(between=between)
    pair.shipping = lambda room, header, tensors: pair.d.posted.put(lambda: pair.d.engine.abort_requests(["r"]))
    pair.d.ask("r", prompts(1, 100)[0])
    for _ in range(30):
        pair.turn()
    assert (pair.leaked, pair.opened) == ([0, 0], set())
    assert len(pair.pieces) < 6
    pair.close()


def test_a_reader_that_lags_holds_back_an_engine_process_too() -> None:
    pair = Pair(between=between, max_inflight=1, blocks=64)
    pair.takes = False
    pair.d.ask("slow", prompts(1, 100)[0])
    for _ in range(20):
        pair.turn()
    assert 0 < pair.prefiller.kept_blocks <= 32
    pair.take_all()
    pair.run()
    assert pair.d.tokens["slow"] == alone("llama", prompts(1, 100)[0], 12)
    assert pair.leaked == [0, 0]
    pair.close()


def test_two_engines_that_name_their_rooms_alike_have_two_rooms() -> None:
    stage, client, _rooms, sinks = joined("decode")
    for rank in range(2):
        client.engines[rank].ask(ROOM, "p", b"prompt", [BLOCK])
    one, other = stage.asks
    assert one != other
    stage.sink.arrived(other, b"header", [BLOCK])
    stage.sink.closed(one, "gone", lost=True)
    assert sinks[1].given == [("arrived", ROOM, b"header", [BLOCK.tolist()])]
    assert sinks[0].given == [("closed", ROOM, "gone", True)]


@pytest.mark.parametrize("attempt", [None, 2])
def test_an_ask_of_a_request_that_has_gone_on_is_told_so(attempt: int | None) -> None:
    stage, client, rooms, sinks = joined("decode")
    stage.attempt = attempt
    client.engines[0].ask(ROOM, "p", b"prompt", [])
    assert (stage.asks, len(rooms)) == ([], 0)
    assert sinks[0].given == [("closed", ROOM, UNKNOWN, True)]


def test_an_engine_that_ends_takes_its_rooms_and_no_others() -> None:
    stage, client, rooms, sinks = joined("prefill")
    first, second = Room("cc", "a", 1, 1), Room("cc", "b", 1, 1)
    for room in (first, second):
        stage.sink.asked(room, "decode", b"record", [BLOCK])
    client.end(client.chosen[0])
    assert stage.closes == [(first, "engine 0 has ended")]
    stage.sink.closed(second, None)
    assert sinks[1].given[-1] == ("closed", second, None, False)
    assert len(rooms) == 0


def test_pieces_of_an_ended_engine_free_nothing_of_the_one_in_its_place() -> None:
    stage, client, _rooms, _sinks = joined("prefill", engines=1)
    freed: list[str] = []
    for life in ("first", "second"):
        client.start(0)
        client.engines[0].attach(Came())
        room = Room("cc", life, 1, 1)
        stage.sink.asked(room, "decode", b"", [])
        client.engines[0].ship(room, Piece(b"", [BLOCK], partial(freed.append, life)))
        if life == "first":
            client.end(0)
    (_, early), (_, late) = stage.shipped
    early.sent()
    assert freed == [] and client.engines[0].unsent == 1
    late.sent()
    assert freed == ["second"] and client.engines[0].unsent == 0


def test_a_piece_for_a_room_that_is_over_is_given_back_at_once() -> None:
    stage, client, _rooms, _sinks = joined("prefill", engines=1)
    freed: list[int] = []
    client.engines[0].ship(ROOM, Piece(b"", [BLOCK], lambda: freed.append(1)))
    assert (stage.shipped, freed) == ([], [1])


def test_prompts_for_a_stage_without_engines_or_one_that_drains_are_declined() -> None:
    stage, client, _rooms, _sinks = joined("prefill", engines=1)
    client.draining = True
    stage.sink.asked(ROOM, "decode", b"", [])
    client.end(0)
    stage.sink.asked(ROOM, "decode", b"", [])
    assert stage.closes == [(ROOM, "the engine is shutting down"), (ROOM, "no engine is left")]


def test_an_engine_is_chosen_by_the_prompt_that_is_asked_for() -> None:
    stage, client, _rooms, _sinks = joined("prefill")
    layout = KVLayout(model="m", revision="", weights="", dtype="float32", block_size=4, pages=())
    ask = PromptAsk(key=bytes(16), layout=layout, first=0, end=1, cache_salt="salt", adapter="sql")
    stage.sink.asked(ROOM, "decode", records.encode(ask), [torch.tensor([5, 6, 7, 8])])
    stage.sink.asked(Room("cc", "s", 1, 0), "decode", b"no ask", [BLOCK])  # its engine declines it
    no_text = records.encode(msgspec.structs.replace(ask, cache_salt="Salt")).replace(b"Salt", b"\xffalt")
    stage.sink.asked(Room("cc", "t", 1, 0), "decode", no_text, [torch.tensor([5, 6, 7, 8])])
    assert client.prompts == [([5, 6, 7, 8], "salt", "sql"), ([],), ([],)]


def test_a_stage_that_ends_ends_its_rooms() -> None:
    stage, client, rooms, _sinks = joined("decode")
    client.engines[0].ask(ROOM, "p", b"", [])
    rooms.detach()
    assert stage.closes == [(stage.asks[0], "the stage ends")]


@pytest.mark.parametrize("kind", [ToStage, ToEngine])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\xa4SENT", msgspec.msgpack.encode(["SENT", "x"])])
def test_what_is_not_a_message_about_blocks_is_refused(kind: Any, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        MsgpackDecoder(kind).decode([body])


def test_a_request_names_its_prefill_instance_to_its_engine() -> None:
    stage, _client, rooms, _sinks = joined("decode")
    request = EngineCoreRequest(request_id="r-0", prompt_token_ids=[1, 2], params=GREEDY)
    bound = carried(rooms.bound(request, "r"), EngineCoreRequest)
    assert bound.kv_source == Source("p", ROOM)
    assert rooms.bound(request, None) is request
    stage.attempt = None
    assert rooms.bound(request, "r").kv_source is None
