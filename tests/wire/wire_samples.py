"""One message of every type, and how any MessagePack reader sees it: the table that holds the wire stable.

All fields differ from each other and from their defaults, so two fields that swap places change the table. A change
here is a change of the protocol: raise `PROTOCOL` with it.
"""

from __future__ import annotations

from typing import Any, Final

from stage_runtime.wire.messages import (
    Abort,
    Ack,
    AdminCall,
    AdminReply,
    Beat,
    Complete,
    Consumed,
    DataReady,
    Deregister,
    Detour,
    Ended,
    ForwardAbort,
    ForwardAbortReply,
    HandBack,
    Hello,
    InputComplete,
    KVAsk,
    KVBeat,
    KVClose,
    KVPiece,
    Members,
    Message,
    PeerUnreachable,
    ProfilerRead,
    ProfilerReply,
    ProfilerStart,
    ProfilerStop,
    RankAnswer,
    RankFailed,
    RankHello,
    RankQuestion,
    RankWork,
    Ready,
    Rejected,
    RelayFailure,
    Release,
    Skip,
    Stream,
    StreamStalled,
    Submit,
    Unbound,
    Welcome,
)
from stage_runtime.wire.parts import Body, Failure, Header, Member, Room, Timing
from stage_runtime.wire.tensorrefs import TensorRef

MEMBER: Final = Member(
    "aa", "voice", "front", "12ab34cd", "ipc:///run/a", {"tcp": {"port": 7}}, ("s1", "s2"), True, attempts_over=6
)
HEADER: Final = Header(
    "r1", 2, "c0ffee", {"thinker": "aa", "talker": "bb"}, 900, "00-ab-cd-01", (MEMBER,), ("coder",), True
)
ROOM: Final = Room("c0ffee", "r1", 2, 7)
_ROOM: Final = ["c0ffee", "r1", 2, 7]
BODY: Final = Body(
    b"\x80",
    (TensorRef("payload.data['h']", (2, 3), "float32", 64, 24, "torch", "cuda:1"),),
    memoryview(b"in"),
    b"shm:x",
    copy_now=True,
)
FAILURE: Final = Failure("stage_failed", "ValueError: no", "talker", "run", "voice", "f00d", "coder")
TIMING: Final = Timing("thinker", 120, 3400, 1_717_000_000_000_000, (("a", False, 0), ("b", True, 5)), (("talker", 9),))

_MEMBER: Final = ["aa", "voice", "front", "12ab34cd", "ipc:///run/a", {"tcp": {"port": 7}}, ["s1", "s2"], True, 1, 6]
_HEADER: Final = ["r1", 2, "c0ffee", {"thinker": "aa", "talker": "bb"}, 900, "00-ab-cd-01", [_MEMBER], ["coder"], True]
_BODY: Final = [b"\x80", [["payload.data['h']", [2, 3], "float32", 64, 24, "torch", "cuda:1"]], b"in", b"shm:x", True]
_FAILURE: Final = ["stage_failed", "ValueError: no", "talker", "run", "voice", "f00d", "coder"]
_TIMING: Final = ["thinker", 120, 3400, 1_717_000_000_000_000, [["a", False, 0], ["b", True, 5]], [["talker", 9]]]

#: (the message, what `msgpack` reads: the tag, then the fields in order)
SAMPLES: Final[list[tuple[Message, list[Any]]]] = [
    (Submit(HEADER, "thinker", BODY), [1, _HEADER, "thinker", _BODY]),
    (
        DataReady(HEADER, "thinker", "talker", BODY, 7, True, FAILURE, "audio", (TIMING,), 5),
        [2, _HEADER, "thinker", "talker", _BODY, 7, True, _FAILURE, "audio", [_TIMING], 5],
    ),
    (Stream("r1", 2, "talker", 7, BODY, "audio", 5), [3, "r1", 2, "talker", 7, _BODY, "audio", 5]),
    (
        Complete("r1", 2, "talker", BODY, 7, FAILURE, (TIMING,), True),
        [4, "r1", 2, "talker", _BODY, 7, _FAILURE, [_TIMING], True],
    ),
    (Abort("r1", 2, "c0ffee", "cancelled"), [5, "r1", 2, "c0ffee", "cancelled"]),
    (Release((3, 4)), [6, [3, 4]]),
    (RelayFailure("nixl", "no byte moved"), [14, "nixl", "no byte moved"]),
    (Consumed("r1", 2, "c0ffee", "thinker", "talker", 64, True), [7, "r1", 2, "c0ffee", "thinker", "talker", 64, True]),
    (HandBack("r1", 2, "talker"), [8, "r1", 2, "talker"]),
    (InputComplete("r1", 2, "talker"), [15, "r1", 2, "talker"]),
    (Ended((("r1", 2), ("r2", 1))), [9, [["r1", 2], ["r2", 1]]]),
    (ForwardAbort("r1", "c0ffee", "a client"), [10, "r1", "c0ffee", "a client"]),
    (ForwardAbortReply("r1", "c0ffee", True, 2), [11, "r1", "c0ffee", True, 2]),
    (Skip(HEADER, "thinker", "talker", 7), [12, _HEADER, "thinker", "talker", 7]),
    (StreamStalled("thinker", "talker", True), [13, "thinker", "talker", True]),
    (Hello(MEMBER, "1:ef01", "hello", "tcp://c:1"), [20, _MEMBER, "1:ef01", "hello", "tcp://c:1"]),
    (Welcome("tcp://c:2", MEMBER, "tcp://c:1", 2.0), [21, "tcp://c:2", _MEMBER, "tcp://c:1", 2.0]),
    (Rejected("aa", "declared dead", True, "tcp://c:1"), [22, "aa", "declared dead", True, "tcp://c:1"]),
    (Members((MEMBER,), ("bb",), 4.0), [23, [_MEMBER], ["bb"], 4.0]),
    (Ready({"s": {"sql": "/a/sql", "old": None}}), [24, {"s": {"sql": "/a/sql", "old": None}}]),
    (Beat({"a": 1}, {"a": 2}, {"a": 3}, {"lag": 0.5}), [25, {"a": 1}, {"a": 2}, {"a": 3}, {"lag": 0.5}]),
    (Deregister("SIGTERM"), [26, "SIGTERM"]),
    (Unbound(), [27]),
    (PeerUnreachable("bb"), [28, "bb"]),
    (Detour("bb", b"\x99"), [29, "bb", b"\x99"]),
    (
        ProfilerStart("c1", "run1", "/events", "/t/{pid}", {"with_stack": True}, 60),
        [41, "c1", "run1", "/events", "/t/{pid}", {"with_stack": True}, 60],
    ),
    (ProfilerStop("c2", "run1"), [42, "c2", "run1"]),
    (ProfilerRead("c3", "run1", "/events/x.jsonl", 7), [45, "c3", "run1", "/events/x.jsonl", 7]),
    (
        ProfilerReply("c3", 1, 2, {"thinker": "started"}, (("/events/x.jsonl", 9),), b"{}", "gone"),
        [46, "c3", 1, 2, {"thinker": "started"}, [["/events/x.jsonl", 9]], b"{}", "gone"],
    ),
    (AdminCall("call", "talker", "flush", {"all": True}), [43, "call", "talker", "flush", {"all": True}]),
    (AdminReply("call", "talker", 1, ["ok"], "no"), [44, "call", "talker", 1, ["ok"], "no"]),
    (Ack(True), [60, True]),
    (RankHello(1, "ipc:///b", {"shm": {}}, "ipc:///c", True), [70, 1, "ipc:///b", {"shm": {}}, "ipc:///c", True]),
    (RankWork(5, "start", "r1", "cc", 2, BODY), [71, 5, "start", "r1", "cc", 2, _BODY]),
    (RankFailed(1, "r1", "cc", 2, "ValueError"), [72, 1, "r1", "cc", 2, "ValueError"]),
    (RankQuestion(1, "aa.rank1", ProfilerStop("c2", "run1"), "cc"), [73, 1, "aa.rank1", [42, "c2", "run1"], "cc"]),
    (RankAnswer("cc", ProfilerReply("c3", 1, 2)), [74, "cc", [46, "c3", 1, 2, {}, [], b"", None]]),
    (KVAsk(ROOM, "think", "pre", BODY, (MEMBER,)), [75, _ROOM, "think", "pre", _BODY, [_MEMBER]]),
    (KVPiece(ROOM, "pre", "think", BODY), [76, _ROOM, "pre", "think", _BODY]),
    (KVClose(ROOM, "pre", "aborted"), [77, _ROOM, "pre", "aborted"]),
    (KVBeat("pre", (ROOM,)), [78, "pre", [_ROOM]]),
]
