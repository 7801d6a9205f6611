"""A value of a client or an author, in every field that they can set, hurts that request alone.

Real processes and sockets. Hypothesis draws a place and a value; the request fails with a code of the closed list, or
is answered, and the next one is served by the same processes. The positive controls take out one check each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.errors import CODES
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e import hostile_stages
from tests.e2e.local_pipelines import HEARTBEAT_S, PATIENCE_S, Client, at_rest, running
from tests.thoroughness import examples

DEADLINE_S = 60.0  # a request that nobody ends fails by this, and the property with it


def pipeline() -> PipelineConfig:
    def stage(name: str, process: str, **fields: Any) -> StageConfig:
        return StageConfig(name=name, process=process, factory=f"hostile_stages:{name}", **fields)

    return PipelineConfig(
        name="hostile",
        serves=["chat"],
        terminal_stages_fn="hostile_stages:terminal_stages_fn",
        control=Control(heartbeat_seconds=HEARTBEAT_S),  # what processes count comes with their beats
        stages=[
            stage("enter", "front", next=["left", "right"], route_fn="hostile_stages:route_fn"),
            stage("left", "front", next="join", project_payload={"join": "hostile_stages:project"}),
            stage("right", "side", next="join"),
            stage(
                "join",
                "joiner",
                wait_for=["left", "right"],
                wait_for_fn="hostile_stages:wait_for_fn",
                merge_fn="hostile_stages:merge_fn",
                next="speak",
                stream_to="speak",
                stream_done_to_fn="hostile_stages:stream_done_to_fn",
            ),
            stage("speak", "voice", terminal=True),
        ],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPipeline]:
    async with up() as made:
        yield made


@contextlib.asynccontextmanager
async def up(**environ: str) -> AsyncIterator[LocalPipeline]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        async with running(pipeline(), Path(folder), environ=environ) as made:
            yield made


# --- what authors give ------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
LEAVES = st.one_of(
    JSON.map(lambda value: ["plain", value]),
    st.sampled_from([["big", 63], ["big", 64], ["big", 200], ["float", "nan"], ["float", "-inf"], ["surrogate"]]),
    st.tuples(st.sampled_from(["x", "\0", "日", "a b"]), st.sampled_from([1, 65, 3000, 300_000])).map(
        lambda text: ["text", *text]
    ),
    st.sampled_from([["bytes", 3], ["bytes", 20_000], ["bytes", 300_000], ["parts", 3], ["parts", 3000]]),
    st.sampled_from([["array", "float32", [2, 3]], ["array", "float32", [50_000]], ["array", "U3", [1]]]),
    st.sampled_from([["object"], ["path"], ["mute"], ["cycle"], ["deep", 63], ["deep", 5000], ["set"], ["generator"]]),
    st.sampled_from([["function"], ["list", "left"], ["list", "speak"], "left", "speak", ["list"], ["list", "ghost"]]),
)


def mixed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(name: str, count: int) -> st.SearchStrategy[Any]:
        return st.tuples(*[inner] * count).map(lambda parts: [name, *parts])

    one = [made(name, 1) for name in ("ints", "request", "routed", "result", "Text", "Finish", "error", "exit")]
    two = [made(name, 2) for name in ("list", "tuple", "dict", "payload", "Audio", "Usage", "Note", "invalid")]
    odd = st.sampled_from(["code", "message", "stage", "hook", "param", "args", "__notes__", "__cause__"])
    attributes = st.tuples(odd, inner).map(lambda pair: ["attributes", *pair])
    return st.one_of(*one, *two, made("chunk", 4), made("failure", 5), attributes)


RECIPES = st.recursive(LEAVES, mixed, max_leaves=4)
CASES = st.fixed_dictionaries(
    {
        "where": st.sampled_from([f"{place}{raises}" for place in hostile_stages.PLACES for raises in ("", " raises")]),
        "what": RECIPES,
    }
)


class Attacker:
    """Asks by plain HTTP, and holds the answers against the promise."""

    def __init__(self, url: str, pids: Callable[[], dict[str, int]]) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"x-request-timeout": str(DEADLINE_S)})
        self._pids = pids
        self._before = pids()

    def send(self, *args: Any, **fields: Any) -> None:
        """Ask something hostile, and then an innocent thing."""
        answer = self._http.request(*args, **fields)
        self.holds(answer)
        self.serves()

    def case(self, case: dict[str, Any], *, stream: bool, chat: bool) -> None:
        if chat:
            message = {"role": "user", "content": json.dumps(case)}
            self.send("POST", "/v1/chat/completions", json={"model": "m", "messages": [message], "stream": stream})
        else:
            self.send("POST", "/v1/pipeline", json={"inputs": case, "stream": stream})

    def holds(self, answer: httpx.Response) -> None:
        error = _error(answer)
        if error is None:
            return
        assert error["code"] in CODES, answer.text[:500]
        assert answer.status_code in (CODES[error["code"]], 200), answer.text[:500]  # 200: it had begun to stream
        assert error["code"] != "deadline", f"nobody ended it: {answer.text[:500]}"

    def serves(self) -> None:
        answer = self._http.post("/v1/pipeline", json={"inputs": {"where": "nowhere"}})
        assert answer.status_code == 200, f"the next request: {answer.text[:500]}"
        note = {"type": "note", "name": "through", "value": True}
        assert answer.json()["results"] == {"speak": [{"type": "text", "text": "shown"}, note]}
        assert self._pids() == self._before, "the same processes"

    def close(self) -> None:
        self._http.close()


def _error(answer: httpx.Response) -> dict[str, Any] | None:
    """The error of an answer, in its body or as an event of its stream."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
        found = [json.loads(event).get("error") for event in events]
        return next((error for error in found if error), None)
    if answer.headers.get("content-type", "").startswith("text/plain"):
        assert answer.status_code == 400, "the HTTP parser's own refusal, before anything of ours"
        return None
    body = answer.json()
    error: dict[str, Any] | None = body.get("error") if isinstance(body, dict) else None
    assert (error is None) == (answer.status_code == 200), answer.text[:500]
    return error


async def attack(made: LocalPipeline, attacks: Callable[[Attacker], None]) -> None:
    """Run a property beside the loop that reads the processes' logs."""
    attacker = Attacker(made.url, made.pids)
    try:
        await asyncio.to_thread(attacks, attacker)
    finally:
        attacker.close()


async def nothing_was_misread(made: LocalPipeline) -> None:
    """No sender said what its receiver refused, and no handler raised; and nothing is left of it all."""
    async with Client(made.url) as client:
        await at_rest(client)
        status = await client.status()
        counted = {one["group"]: one["gauges"] for one in status["instances"]} | {"coordinator": status["gauges"]}
        for name in ("unreadable", "malformed", "handler_errors", "unknown_peers"):
            found = {group: gauges.get(f"control_{name}", 0) for group, gauges in counted.items()}
            assert not any(found.values()), (name, found)


EXAMPLES: list[dict[str, Any]] = [
    {"where": "chunk.modality", "what": 7},
    {"where": "shown.modality", "what": ["text", "x", 65]},
    {"where": "enter raises", "what": ["invalid", "no", 3]},
    {"where": "enter raises", "what": ["failure", "invalid_request", "no", ["list", "a"], None, None]},
    {"where": "left raises", "what": ["mute"]},
    {"where": "enter raises", "what": ["mute"]},
    {"where": "right raises", "what": ["invalid", ["text", "x", 300_000], ["path"]]},
    {"where": "merge_fn raises", "what": ["attributes", "code", ["list"]]},
    {"where": "shown.data", "what": ["Text", 5]},
    {"where": "shown result", "what": "a str"},
    {"where": "enter", "what": ["parts", 27_000]},
    {"where": "terminal_stages_fn raises", "what": ["exit", 1]},
    {"where": "terminal_stages_fn raises", "what": ["invalid", ["object"], ["path"]]},
    {"where": "terminal_stages_fn raises", "what": ["mute"]},
    {"where": "terminal_stages_fn", "what": ["object"]},
    {"where": "project", "what": ["payload", 5, 1]},
]


def authors(attacker: Attacker, *, count: int, known: list[dict[str, Any]] = EXAMPLES) -> None:
    """count: of examples, beside those that are ``known``; 0: none."""

    @settings(
        max_examples=max(1, count),
        deadline=None,
        database=None,
        phases=tuple(Phase) if count else (Phase.explicit,),
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(case=CASES, stream=st.booleans(), chat=st.booleans())
    def holds(case: dict[str, Any], stream: bool, chat: bool) -> None:
        attacker.case(case, stream=stream, chat=chat)

    for one in known:
        for stream, chat in ((False, False), (True, True)):
            holds = example(case=one, stream=stream, chat=chat)(holds)
    holds()


@pytest.mark.proves("any-field-any-value")
async def test_whatever_an_author_gives_or_raises_hurts_its_request_alone(attacked: LocalPipeline) -> None:
    await attack(attacked, lambda attacker: authors(attacker, count=examples(100)))
    await nothing_was_misread(attacked)


SEEN = {  # by what the property sees that the check is missing
    "the check of messages": "unreadable",  # each one stepped over, and nobody else hurt: there is a second check
    "the guard of texts": "nobody ended it|the next request|the same processes",  # its process ends
}


@pytest.mark.proves("any-field-any-value")
@pytest.mark.parametrize(
    "without", ["the check of messages", pytest.param("the guard of texts", marks=pytest.mark.nightly)]
)
async def test_without_one_check_the_property_is_seen_to_fail(without: str) -> None:
    """The positive control."""
    async with up(HOSTILE_WITHOUT=without) as made:
        with pytest.raises(AssertionError, match=SEEN[without]):
            known = [one for one in EXAMPLES if one["where"] in ("chunk.modality", "left raises")]
            await attack(made, lambda attacker: authors(attacker, count=0, known=known))
            await nothing_was_misread(made)


# --- what clients say -------------------------------------------------------------------------------------------

IDS = st.one_of(
    st.text(max_size=200),
    st.integers(100, 3000).map(lambda length: "x" * length),
    st.sampled_from(["..", ".", "%", "a/b"]),
).filter(lambda text: "\ud800" not in text)
VALUES = st.binary(max_size=200).map(lambda value: bytes(byte for byte in value if byte not in b"\r\n\0\v\f").strip())
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "x-request-id": VALUES,
        "traceparent": VALUES,
        "x-request-timeout": st.sampled_from(
            ["nan", "inf", "-1", "1e309", "0x10", "", "1e300", "99999999999999999999"]
        ),
    },
)
RAW = st.sampled_from(
    [
        b'{"inputs": "\\ud800"}',
        b'{"inputs": 1e999}',
        b'{"inputs": NaN}',
        b'{"inputs": ' + b"9" * 5000 + b"}",
        b'{"inputs": {"\\u0000": "\\u0000"}}',
        b'{"inputs": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"inputs": 1, "inputs": 2, "timeout": -1}',
        b"\xff\xfe",
        b"",
    ]
)
FIELD = st.sampled_from(["inputs", "params", "metadata", "modalities", "stream", "timeout"])
BODIES = st.dictionaries(FIELD, JSON | st.sampled_from(["x" * 65, 2**63, 2**64, -1, 10**30]), max_size=4)
NAMES = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([b"\x01" * 200, b"\t", "日".encode() * 80, b"n" * 300, b"inputs", b"stream", b"a b"]),
).map(lambda name: bytes(byte for byte in name if byte not in b'\r\n"\\') or b"n")


def form(parts: list[tuple[bytes, int, bool]]) -> tuple[bytes, dict[str, str]]:
    pieces = []
    for name, size, is_file in parts:
        head = b'--b\r\ncontent-disposition: form-data; name="' + name + b'"'
        pieces.append(head + (b'; filename="f"' if is_file else b"") + b"\r\n\r\n" + b"1" * size + b"\r\n")
    return b"".join(pieces) + b"--b--\r\n", {"content-type": "multipart/form-data; boundary=b"}


FORMS = st.one_of(
    st.lists(st.tuples(NAMES, st.sampled_from([0, 1, 20_000]), st.booleans()), max_size=4),
    st.sampled_from([b"\x01", b"\x01" * 230, b"n"]).map(
        lambda name: [(name + b"%d" % index, 20_000, True) for index in range(200)]
    ),
)


@pytest.mark.long
@pytest.mark.proves("any-field-any-value")
async def test_any_value_of_a_client_fails_its_own_request_alone(attacked: LocalPipeline) -> None:
    def attacks(attacker: Attacker) -> None:
        @settings(max_examples=examples(50), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
        @given(request_id=IDS, method=st.sampled_from(["GET", "DELETE"]))
        @example(request_id="x" * 129, method="DELETE")
        def ids(request_id: str, method: str) -> None:
            from urllib.parse import quote

            attacker.send(method, f"/v1/requests/{quote(request_id, safe='')}")

        @settings(max_examples=examples(60), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
        @given(body=BODIES, headers=HEADERS)
        def bodies(body: dict[str, Any], headers: dict[str, Any]) -> None:
            attacker.send("POST", "/v1/pipeline", json=body, headers=headers)

        @settings(max_examples=examples(20), deadline=None, database=None)
        @given(raw=RAW)
        def raws(raw: bytes) -> None:
            attacker.send("POST", "/v1/pipeline", content=raw, headers={"content-type": "application/json"})

        @settings(max_examples=examples(40), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
        @given(parts=FORMS)
        def forms(parts: list[tuple[bytes, int, bool]]) -> None:
            body, headers = form(parts)
            attacker.send("POST", "/v1/pipeline", content=body, headers=headers)

        for attack_of in (ids, bodies, raws, forms):
            attack_of()

    await attack(attacked, attacks)
    await nothing_was_misread(attacked)
