"""Real sockets: order, exactly once, strangers, garbage, and who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from stage_runtime.errors import ConfigurationError, LimitReached, ValueRefused
from stage_runtime.sockets.endpoints import limits, opening
from stage_runtime.sockets.endpoints.addresses import CurveSecurity, check, resolve
from stage_runtime.wire import codec
from stage_runtime.wire.frames import FRAME_LIMIT, PROTOCOL, Envelope, Frame, RequestRef
from stage_runtime.wire.messages import Abort, AdminReply, Consumed, Deregister, Rejected
from tests.sockets.peers import PATIENCE_S, SECRET, End, PeerProcess, Proxy, ends, hello, introduce

KINDS = ["ipc", "tcp", "curve"]


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket paths are bounded; pytest's are long."""
    path = Path(tempfile.mkdtemp(prefix="omni"))
    yield path
    shutil.rmtree(path)


def place(kind: str, path: Path, name: str) -> str:
    return f"ipc://{path}/{name}" if kind == "ipc" else "tcp://127.0.0.1:*"


def security(kind: str) -> CurveSecurity | None:
    return CurveSecurity(SECRET) if kind == "curve" else None


@pytest.mark.parametrize("kind", KINDS)
async def test_messages_arrive_once_and_in_order_both_ways(kind: str, short_path: Path) -> None:
    a = End("aa", place(kind, short_path, "a"), security=security(kind))
    b = End("bb", place(kind, short_path, "b"), security=security(kind))
    async with ends(a, b):
        introduce(a, b)
        words = [str(index) for index in range(1000)]
        for word in words:
            a.send("bb", word)
            b.send("aa", word)
        await b.listener.until(lambda: len(b.listener.received_words) >= 1000)
        await a.listener.until(lambda: len(a.listener.received_words) >= 1000)
        assert a.listener.received_words == b.listener.received_words == words
        assert await a.channels.settled(PATIENCE_S)
        assert await b.channels.settled(PATIENCE_S)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_says_hello_is_introduced_and_answered(kind: str, short_path: Path) -> None:
    a = End("aa", place(kind, short_path, "a"), security=security(kind))
    b = End("bb", place(kind, short_path, "b"), security=security(kind))
    async with ends(a, b):
        unnamed = a.channels.connect("", b.endpoint)
        while not b.channels.link("aa"):
            unnamed.send_unordered(hello(a))
            await asyncio.sleep(0.01)
        b.send("aa", "welcome")  # a does not know b yet: it is a stranger's until a names the link
        await a.listener.until(lambda: "bb" in a.listener.strangers)
        assert a.channels.name(b.endpoint, "bb") is unnamed
        await a.listener.until(lambda: a.listener.received_words == ["welcome"])
        a.send("bb", "thanks")
        await b.listener.until(lambda: b.listener.received_words == ["thanks"])


async def test_many_threads_may_say_at_once_and_each_ones_order_is_kept(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)

        def talk(name: int) -> None:
            for index in range(500):
                a.send("bb", f"{name}:{index}")

        threads = [threading.Thread(target=talk, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        await b.listener.until(lambda: len(b.listener.received_words) >= 3000)
        for thread in threads:
            thread.join()
        received = b.listener.received_words
        assert len(received) == 3000
        for name in range(6):
            mine = [word for word in received if word.startswith(f"{name}:")]
            assert mine == [f"{name}:{index}" for index in range(500)]


def count_messages(end: End) -> list[int]:
    """The number of frames of each message that leaves ``end``'s sockets from now on."""
    counts: list[int] = []
    for link in filter(None, map(end.channels.link, end.channels.peers)):
        assert link.connection is not None
        dialer = link.connection._dialer
        send = dialer.send

        def counted(routing_id: bytes, frames: Sequence[bytes], send: Any = send) -> None:
            counts.append(len(frames))
            send(routing_id, frames)

        dialer.send = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_sent_together_leaves_at_the_end_as_one_message_in_order(kind: str, short_path: Path) -> None:
    a = End("aa", place(kind, short_path, "a"), security=security(kind))
    b = End("bb", place(kind, short_path, "b"), security=security(kind))
    async with ends(a, b):
        introduce(a, b)
        a.send("bb", "before")
        await b.listener.until(lambda: b.listener.received_words == ["before"])
        counts = count_messages(a)
        with a.channels.together():
            a.send("bb", "first")
            with a.channels.together():
                a.send("bb", "second")
            assert counts == []
            a.send("bb", "third")
        a.send("bb", "after")
        assert counts == [3, 1]
        await b.listener.until(lambda: len(b.listener.received_words) >= 5)
        assert b.listener.received_words == ["before", "first", "second", "third", "after"]


async def test_what_must_not_wait_takes_along_what_was_kept_before_it(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        a.send("bb", "before")
        await b.listener.until(lambda: b.listener.received_words == ["before"])
        with a.channels.together():
            a.send("bb", "kept")
            assert a.channels.send_now("bb", Deregister("now"))
            await b.listener.until(lambda: b.listener.received_words == ["before", "kept", "now"])


async def test_what_is_sent_together_leaves_although_the_sender_raises(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        with pytest.raises(KeyError), a.channels.together():
            a.send("bb", "kept")
            raise KeyError
        await b.listener.until(lambda: b.listener.received_words == ["kept"])


async def test_threads_that_send_together_keep_their_orders(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)

        def talk(name: int) -> None:
            for begin in range(0, 500, 5):
                with a.channels.together():
                    for index in range(begin, begin + 5):
                        a.send("bb", f"{name}:{index}")

        threads = [threading.Thread(target=talk, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        await b.listener.until(lambda: len(b.listener.received_words) >= 3000)
        for thread in threads:
            thread.join()
        received = b.listener.received_words
        assert len(received) == 3000
        for name in range(6):
            mine = [word for word in received if word.startswith(f"{name}:")]
            assert mine == [f"{name}:{index}" for index in range(500)]


COUNT = 20_000


async def talk_through_cuts(proxy: Proxy, send: Callable[[str], None]) -> None:
    """20,000 words; the connection breaks twice, each time with words on the way, and comes back."""
    for index in range(COUNT):
        if index in (5_000, 12_000):
            proxy.hold()
        if index in (5_200, 12_200):
            async with asyncio.timeout(PATIENCE_S):
                while not proxy.held:
                    await asyncio.sleep(0.001)
            proxy.cut()
        send(str(index))
        if index % 100 == 0:
            await asyncio.sleep(0.001)


@pytest.mark.proves("connection-breaks")
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "curve"])
async def test_nothing_is_lost_or_doubled_when_the_connection_is_cut_under_load(secure: bool) -> None:
    late: dict[str, Any] = {"reconnect_grace_s": PATIENCE_S}  # on a busy machine it is back late
    keys = security("curve" if secure else "tcp")
    a, b = (End(name, "tcp://127.0.0.1:*", security=keys, **late) for name in ("aa", "bb"))
    async with ends(a, b):
        with contextlib.closing(Proxy(b.endpoint)) as proxy:
            introduce(a, b, via=proxy.endpoint)
            await b.listener.until(lambda: a.channels.counters["connected"] >= 1)
            await talk_through_cuts(proxy, lambda word: a.send("bb", word))
            await b.listener.until(lambda: len(b.listener.received_words) >= COUNT)
            assert b.listener.received_words == [str(index) for index in range(COUNT)]
            assert await a.channels.settled(PATIENCE_S)
            assert a.channels.counters["disconnected"] >= 1
            assert 0 < a.channels.counters["resent"] < 5 * COUNT  # asked for once, not once per frame
            assert a.listener.lost_peers == []


async def test_without_acknowledgements_the_same_cuts_lose_messages() -> None:
    """The positive control: bare ZeroMQ, as above, says nothing and loses what was under way."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for one in (pull, push):
        one.linger = 0
        one.sndhwm = one.rcvhwm = 0
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    received = 0
    with contextlib.closing(Proxy(f"tcp://127.0.0.1:{port}")) as proxy:
        push.connect(proxy.endpoint)
        push.send(b"connected")
        assert pull.poll(int(PATIENCE_S * 1000)) and pull.recv()
        await talk_through_cuts(proxy, lambda word: push.send(word.encode()))
        while pull.poll(int(PATIENCE_S * 1000)):
            received += 1
            if pull.recv() == str(COUNT - 1).encode():  # sent after the cuts: it comes
                break
    context.destroy(linger=0)
    assert 0 < received < COUNT


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_process_is_lost_with_its_connection_and_its_next_life_is_another_peer(
    kind: str, short_path: Path
) -> None:
    a = End("aa", place(kind, short_path, "a"), security=security(kind), dead_after_s=86_400)  # heartbeats find nothing
    peer = PeerProcess("b1", place(kind, short_path, "b"), secure=kind == "curve")
    async with ends(a):
        a.channels.connect("b1", peer.endpoint)
        greeting = a.channels.link("b1")
        assert greeting is not None
        while "hi" not in a.listener.received_words:
            greeting.send_unordered(hello(a))
            if "b1" not in a.listener.strangers and greeting.undelivered == 0:
                a.send("b1", "hi")
            await asyncio.sleep(0.02)
        peer.signal(signal.SIGKILL)
        for index in range(100):
            a.channels.send("b1", Deregister(f"into the void {index}"))
        await a.listener.until(lambda: bool(a.listener.lost_peers))
        assert [peer for peer, _ in a.listener.lost_peers] == ["b1"]
        assert not a.channels.send("b1", Deregister("nobody"))
        peer.end()

        again = PeerProcess("b2", peer.endpoint if kind == "ipc" else "tcp://127.0.0.1:*", secure=kind == "curve")
        link = a.channels.connect("b2", again.endpoint)
        a.send("b2", "first word of the new life")
        while not a.listener.received_words[1:]:
            link.send_unordered(hello(a))
            await asyncio.sleep(0.02)
        assert a.listener.received_words[1:] == ["first word of the new life"]
        again.end()


async def test_a_frozen_process_is_lost_by_the_time_that_was_declared() -> None:
    """Its connection stays: who declares a longer time has not lost it yet."""
    a, patient = End("aa", "tcp://127.0.0.1:*", dead_after_s=1.0), End("pp", "tcp://127.0.0.1:*", dead_after_s=86_400)
    peer = PeerProcess("b1", "tcp://127.0.0.1:*")
    async with ends(a, patient):
        links = [one.channels.connect("b1", peer.endpoint) for one in (a, patient)]
        await a.listener.until(lambda: all(link.connected for link in links))
        peer.signal(signal.SIGSTOP)
        try:
            await a.listener.until(lambda: bool(a.listener.lost_peers))
            assert patient.listener.lost_peers == []
        finally:
            peer.signal(signal.SIGCONT)
            peer.end()


async def test_an_endpoint_where_nobody_listens_is_lost_after_the_declared_time(short_path: Path) -> None:
    a = End("aa", place("ipc", short_path, "a"), dead_after_s=0.3)
    async with ends(a):
        a.channels.connect("ghost", f"ipc://{short_path}/nobody")
        await a.listener.until(lambda: [peer for peer, _ in a.listener.lost_peers] == ["ghost"])


@pytest.mark.proves("connection-breaks")
async def test_an_end_that_dropped_its_session_alone_connects_again() -> None:
    """Both count from one again. The other end would take every new frame for a duplicate without sessions."""
    a, b = End("aa", "tcp://127.0.0.1:*"), End("bb", "tcp://127.0.0.1:*")
    async with ends(a, b):
        introduce(a, b)
        for index in range(50):
            a.send("bb", f"old {index}")
            b.send("aa", f"old {index}")
        await b.listener.until(lambda: len(b.listener.received_words) == 50)
        await a.listener.until(lambda: len(a.listener.received_words) == 50)
        assert await a.channels.settled(PATIENCE_S)
        a.channels.drop("bb")  # as when only this end's connection broke
        a.channels.connect("bb", b.endpoint)
        a.send("bb", "new")
        await b.listener.until(lambda: [peer for peer, _ in b.listener.lost_peers] == ["aa"])
        b.channels.connect("aa", a.endpoint)
        b.send("aa", "new too")
        await b.listener.until(lambda: b.listener.received_words[50:] == ["new"])
        await a.listener.until(lambda: a.listener.received_words[50:] == ["new too"])
        assert a.listener.lost_peers == []


async def test_frames_of_the_link_before_are_not_delivered_again_on_the_next_one(short_path: Path) -> None:
    """A frame that its sender repeats, first sent before it had heard anything: it names no link of ours."""
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        a.send("bb", "old")
        b.send("aa", "old")
        await a.listener.until(lambda: a.listener.received_words == ["old"])
        assert await a.channels.settled(PATIENCE_S)  # so b has heard this link, and a knows
        assert await b.channels.settled(PATIENCE_S)  # and repeats nothing itself
        a.channels.drop("bb")
        link = a.channels.connect("bb", b.endpoint)
        await a.listener.until(lambda: link.connected)
        late = raw(a.endpoint)
        late.send(frame("bb", "aa", Deregister("old")))
        await a.listener.until(lambda: a.channels.counters["stale_sessions"] >= 1)
        late.close()
        await b.listener.until(lambda: [peer for peer, _ in b.listener.lost_peers] == ["aa"])  # it is notified
        b.channels.connect("aa", a.endpoint)
        b.send("aa", "new")
        await a.listener.until(lambda: a.listener.received_words == ["old", "new"])
        assert a.listener.lost_peers == []


async def test_links_of_long_ago_are_forgotten(short_path: Path) -> None:
    a = End("aa", place("ipc", short_path, "a"), given_up_kept=3)
    async with ends(a):
        for number in range(10):
            a.channels.connect(f"p{number}", f"ipc://{short_path}/{number}")
            a.channels.drop(f"p{number}")
        kept = [name for name, value in vars(a.channels).items() if isinstance(value, dict) and len(value) > 3]
        assert kept == []


async def test_an_end_that_is_still_spoken_to_on_its_old_link_says_so() -> None:
    """The other end learns of it even where this one has nothing to say."""
    a, b = End("aa", "tcp://127.0.0.1:*"), End("bb", "tcp://127.0.0.1:*")
    async with ends(a, b):
        introduce(a, b)
        a.send("bb", "old")
        b.send("aa", "old")
        await a.listener.until(lambda: a.listener.received_words == ["old"])
        assert await a.channels.settled(PATIENCE_S)
        assert await b.channels.settled(PATIENCE_S)
        a.channels.drop("bb")
        link = a.channels.connect("bb", b.endpoint)
        await a.listener.until(lambda: link.connected)
        b.send("aa", "to the old link")
        await b.listener.until(lambda: [peer for peer, _ in b.listener.lost_peers] == ["aa"])
        assert a.listener.received_words == ["old"]
        assert a.channels.counters["stale_sessions"] >= 1


async def test_a_stranger_is_asked_about_and_not_heard(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        a.channels.connect("bb", b.endpoint)
        a.send("bb", "who am I")
        await b.listener.until(lambda: "aa" in b.listener.strangers)
        assert b.listener.received_words == []
        assert b.channels.counters["unknown_peers"] >= 1
        b.channels.connect("aa", a.endpoint)  # introduced later: nothing was lost
        await b.listener.until(lambda: b.listener.received_words == ["who am I"])


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_peer_is_lost_when_another_incarnation_answers_at_its_address(kind: str, short_path: Path) -> None:
    """A process that was stopped when its peer ended goes on when another one has the address: it hears of that."""
    a, b = End("aa", place(kind, short_path, "a")), End("bb", place(kind, short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        a.channels.connect("b0", b.endpoint)  # an earlier life of b
        a.channels.hint("b0", Deregister("as a beat, which nobody acknowledges"))
        a.send("b0", "for the dead")
        await a.listener.until(lambda: [peer for peer, _ in a.listener.lost_peers] == ["b0"])
        assert b.channels.counters["misdirected"] > 0
        assert b.listener.received_words == []
        a.send("bb", "for the living")
        await b.listener.until(lambda: b.listener.received_words == ["for the living"])
        assert [peer for peer, _ in a.listener.lost_peers] == ["b0"]


def raw(endpoint: str) -> zmq.Socket[bytes]:
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(endpoint)
    return dealer


def frame(sender: str, receiver: str, message: object, **fields: int) -> bytes:
    numbers = {"session": 1, "ack_session": 0, "seq": 1, "ack": 0, **fields}
    return codec.encode(Frame(PROTOCOL, sender, receiver, *numbers.values(), message))  # type: ignore[call-arg,arg-type]


def unreadable(sender: str, receiver: str, seq: int, request: RequestRef | None) -> bytes:
    """A frame whose message no receiver knows."""
    return msgspec.msgpack.encode(
        Envelope(PROTOCOL, sender, receiver, 1, 0, seq, 0, request, memoryview(b"\x91\xcc\xc8"))
    )


@pytest.mark.proves("undecodable-message")
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_message_that_cannot_be_read_is_skipped_reported_and_logged_once(
    kind: str, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = End("aa", place(kind, short_path, "a")), End("bb", place(kind, short_path, "b"))
    async with ends(a, b):
        b.channels.connect("aa", a.endpoint)
        link = a.channels.connect("bb", b.endpoint)
        about = RequestRef("r1", 3, "cc")
        odd = raw(b.endpoint)  # says as a what a itself refuses to say
        odd.send(unreadable("aa", "bb", 1, about))
        odd.send(frame("aa", "bb", Deregister("next"), seq=2))
        odd.send(unreadable("aa", "bb", 3, None))
        odd.send(unreadable("aa", "bb", 3, None))  # again: it has been stepped over
        odd.send(frame("aa", "bb", Deregister("last"), seq=4))
        await b.listener.until(lambda: b.listener.received_words == ["next", "last"])
        assert b.listener.unread == [("aa", about), ("aa", None)]
        assert b.channels.counters["unreadable"] == 2
        assert b.channels.counters["duplicates"] == 1
        assert b.channels.counters["gaps"] == 0
        assert caplog.text.count("a message of aa cannot be read") == 1
        await a.listener.until(lambda: link.incoming.peer_session == 1)  # b has acknowledged, as of anything else
        odd.close()


async def test_a_request_whose_message_could_not_be_dealt_with_is_reported(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        b.listener.raises = ValueError("on purpose")
        a.channels.send("bb", Consumed("r1", 2, "cc", "s", "t", 1))
        a.send("bb", "next")
        await b.listener.until(lambda: b.listener.received_words == ["next"])
        assert b.listener.unread == [("aa", RequestRef("r1", 2, "cc"))]
        assert b.channels.counters["handler_errors"] == 1


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_garbage_and_oversized_frames_are_counted_and_nobody_else_notices(kind: str, short_path: Path) -> None:
    a, b = End("aa", place(kind, short_path, "a")), End("bb", place(kind, short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        intruder = raw(b.endpoint)
        for data in (b"", b"\x00", b"\xff" * 1000, b"\x91" * 10_000, frame("aa", "bb", Rejected("x", "y"))[:-2]):
            intruder.send(data)
        await b.listener.until(lambda: b.channels.counters["malformed"] == 5)
        assert b.channels.other_protocol_at < 0
        intruder.send(b"\x92" + bytes([PROTOCOL + 1]) + b"\xc0")
        await b.listener.until(lambda: b.channels.counters["other_protocol"] == 1)
        assert 0 <= time.monotonic() - b.channels.other_protocol_at < 60
        intruder.send(b"\x00" * (FRAME_LIMIT + 1))  # libzmq closes the connection on it
        intruder.close()
        other = raw(b.endpoint)
        other.send(b"\x93garbage")
        await b.listener.until(lambda: b.channels.counters["malformed"] == 6)
        other.close()
        a.send("bb", "still here")
        await b.listener.until(lambda: b.listener.received_words == ["still here"])
        assert b.listener.lost_peers == []


async def test_bytes_that_are_no_zeromq_at_all_hurt_nobody() -> None:
    a, b = End("aa", "tcp://127.0.0.1:*"), End("bb", "tcp://127.0.0.1:*")
    async with ends(a, b):
        introduce(a, b)
        port = int(b.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\x00" * 5000)
            a.send("bb", "still here")
            await b.listener.until(lambda: b.listener.received_words == ["still here"])


async def test_a_false_ack_frees_nothing(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        link = a.channels.connect("bb", b.endpoint)  # b does not know a, and so acknowledges nothing
        a.send("bb", "keep me")
        liar = raw(a.endpoint)
        liar.send(frame("bb", "aa", Deregister("lie"), ack_session=link.incoming.session, ack=99))
        await a.listener.until(lambda: a.listener.received_words == ["lie"])
        assert link.undelivered == 1
        liar.close()


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["no key", "another pipeline's key"])
async def test_who_has_not_the_pipelines_key_is_not_let_in(key: bytes | None) -> None:
    b = End("bb", "tcp://127.0.0.1:*", security=CurveSecurity(SECRET))
    a = End("aa", "tcp://127.0.0.1:*", security=CurveSecurity(key) if key else None, dead_after_s=0.5)
    async with ends(a, b):
        while not b.channels.counters["handshake_failures"]:  # a busy machine may take longer than half a second
            a.listener.lost_peers.clear()
            a.channels.connect("bb", b.endpoint)
            a.send("bb", "let me in")
            await a.listener.until(lambda: [peer for peer, _ in a.listener.lost_peers] == ["bb"])
        assert set(b.channels.counters) == {"handshake_failures"}
        assert b.channels.other_protocol_at > 0, "a coordinator that is new is not ready beside it"


async def test_an_exception_in_the_handler_costs_one_message_and_no_more(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        b.listener.raises = RuntimeError("a bug")
        for index in range(1000):  # more than one wake-up's worth: the descriptor says it once
            a.send("bb", str(index))
        await b.listener.until(lambda: len(b.listener.received_words) >= 999)
        assert b.listener.received_words == [str(index) for index in range(1, 1000)]
        assert b.channels.counters["handler_errors"] == 1


async def test_a_message_that_cannot_be_said_raises_and_leaves_no_hole(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        with pytest.raises(ValueRefused):
            a.channels.send("bb", AdminReply("c", "s", 0, object()))
        with pytest.raises(ValueRefused):
            a.send("bb", "x" * FRAME_LIMIT)
        a.send("bb", "after")
        await b.listener.until(lambda: b.listener.received_words == ["after"])


async def test_broadcast_aborts_are_received_and_nothing_else_is(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    async with ends(a, b):
        introduce(a, b)
        publisher = a.channels.bind_publisher(f"ipc://{short_path}/pub")
        b.channels.subscribe(publisher)
        b.channels.subscribe(publisher)  # once is enough
        published = Abort("r1", 1, "aa", "cancelled")
        while not b.listener.messages:
            a.channels.publish(Deregister("not for broadcast"))
            a.channels.publish(published)
            await asyncio.sleep(0.02)
        assert {message for _, message in b.listener.messages} == {published}
        b.channels.unsubscribe(publisher)


async def test_broadcasts_of_another_protocol_are_counted_as_such(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    frame = codec.encode(Frame(PROTOCOL + 1, "aa", "", 0, 0, 0, 0, Abort("r1", 1, "aa", "cancelled")))
    async with ends(a, b):
        introduce(a, b)
        with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
            publisher.bind(f"ipc://{short_path}/pub")
            b.channels.subscribe(f"ipc://{short_path}/pub")
            while not b.channels.counters["other_protocol"]:
                publisher.send(frame)
                await asyncio.sleep(0.02)
        assert b.channels.counters["malformed"] == 0
        assert b.listener.messages == []


async def test_a_backlog_beyond_the_sockets_buffers_is_delivered_when_the_peer_comes(short_path: Path) -> None:
    a = End("aa", place("ipc", short_path, "a"))
    async with ends(a):
        a.channels.connect("bb", f"ipc://{short_path}/b")
        for index in range(6000):
            a.send("bb", str(index))
        assert not await a.channels.settled(0.05)
        b = End("bb", place("ipc", short_path, "b"))
        async with ends(b):
            b.channels.connect("aa", a.endpoint)
            await b.listener.until(lambda: len(b.listener.received_words) >= 6000)
            assert b.listener.received_words == [str(index) for index in range(6000)]
            assert await a.channels.settled(PATIENCE_S)


@pytest.mark.proves("address-taken")
@pytest.mark.parametrize("way", ["bind", "bind_publisher"])
async def test_an_endpoint_that_cannot_be_bound_is_named_with_the_reason_and_the_process_can_end(way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        end = End("aa", "tcp://127.0.0.1:*")
        async with ends(end):
            with pytest.raises(ConfigurationError, match=f"cannot listen at {endpoint}: Address already in use"):
                getattr(end.channels, way)(endpoint)
            with pytest.raises(ConfigurationError, match="cannot listen at ipc:///nowhere/at/all: No such file"):
                getattr(end.channels, way)("ipc:///nowhere/at/all")


async def test_a_link_for_a_refusal_that_is_used_for_good_is_checked_for_limits_and_stays(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise LimitReached("no room")

    a, b, c = (End(name, place("ipc", short_path, name)) for name in ("aa", "bb", "cc"))
    async with ends(a, b, c):
        for end in (b, c):
            end.channels.connect("aa", a.endpoint)
            a.channels.dismiss(end.name, end.endpoint, Rejected(end.name, "no room"))
        with monkeypatch.context() as limited:  # not the real one: libzmq's thread connects meanwhile, and aborts at it
            limited.setattr(limits, "check", refuse)
            with pytest.raises(LimitReached):
                a.channels.connect("bb", b.endpoint)
        link = a.channels.connect("bb", b.endpoint)
        await a.listener.until(lambda: a.channels.link("cc") is None)  # that link was for the refusal alone
        a.send("bb", "welcome")  # behind the refusal, after which the link would have been closed
        await b.listener.until(lambda: b.listener.received_words == ["welcome"])
        assert a.channels.link("bb") is link


async def test_closing_twice_and_saying_afterwards_do_no_harm(short_path: Path) -> None:
    a, b = End("aa", place("ipc", short_path, "a")), End("bb", place("ipc", short_path, "b"))
    introduce(a, b)
    link = a.channels.link("bb")
    assert link is not None
    for end in (a, b):
        end.channels.close()
        end.channels.close()
    link.send(Deregister("late"))
    assert not a.channels.send("bb", Deregister("late"))


def test_a_socket_path_over_the_kernels_limit_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigurationError, match=r"set a shorter endpoints\.basePath"):
        check("ipc:///" + "x" * 107)
    assert check("ipc:///" + "x" * 106)
    with pytest.raises(ConfigurationError, match="expected ipc:// or tcp://"):
        check("udp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("ipc:///run/a", ["ipc:///run/a"]),
        ("tcp://127.0.0.1:5550", ["tcp://127.0.0.1:5550"]),
        ("tcp://[::1]:5550", ["tcp://[::1]:5550"]),
        ("tcp://no-such-host.invalid:5550", []),
    ],
)
def test_names_become_addresses_and_addresses_stay(endpoint: str, found: list[str]) -> None:
    assert resolve(endpoint) == found


def test_a_key_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="5 bytes; expected 32"):
        CurveSecurity.read(tmp_path / "key")
    with pytest.raises(ConfigurationError, match="No such file"):
        CurveSecurity.read(tmp_path / "absent")


@pytest.mark.parametrize("dead_after_s", [1e-9, 0.002, 0.1, 3.0, 31_536_000.0])
async def test_any_legal_time_is_one_that_libzmq_beats_in(dead_after_s: float) -> None:
    """0 would switch heartbeats off, and more than a C int holds ended the process when it started."""
    opened = opening.Sockets(
        asyncio.get_running_loop(),
        security=None,
        dead_after_s=dead_after_s,
        handshake_failed=print,
        short_connection=print,
    )
    made = opened.make(zmq.PUSH)
    interval, timeout = made.getsockopt(zmq.HEARTBEAT_IVL), made.getsockopt(zmq.HEARTBEAT_TIMEOUT)
    assert isinstance(interval, int) and isinstance(timeout, int)
    made.close()
    opened.close()
    assert interval >= 1 and timeout >= 1
    if 0.01 <= dead_after_s <= 86_400:
        assert dead_after_s * 990 <= interval + timeout <= dead_after_s * 1000
