"""A client may send any bytes: it gets an answer of the closed list, never a fault of ours, and the next one is served.

hypothesis draws requests for every route of a real server (uvicorn, httptools, uvloop's protocol of ours) and sends
them over real sockets. `test_the_property_finds_a_fault` is the control: a route that has one is found.
"""

from __future__ import annotations

import asyncio
import re
import string
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stage_runtime.coordinator.admitting.terminal_stages import TerminalStagesResult
from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import CODES, InvalidRequest, RequestError, ValueRefused
from stage_runtime.payloads import encoding
from stage_runtime.web.app import make_app
from stage_runtime.web.exchanges import errors
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits
from stage_runtime.web.listening.server import Server
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import Audio, Image, Note, OmniRequest, Scores, Text, Usage, Vectors
from tests.thoroughness import examples
from tests.web.running import ALL, PATIENCE_S
from tests.web.scripted_manager import Event, ScriptedHandle, ScriptedManager

STATUSES = {200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431}
LIMITED = msgspec.structs.replace(
    ALL, max_body_bytes=200_000, media_hosts=("127.0.0.1:1",), media_timeout_s=0.5, body_grace_s=0.2
)
QUICK = ConnectionLimits(sweep_s=0.02, head_s=0.5, idle_s=0.5, discard_s=0.5)
INNOCENT = (
    b"POST /v1/pipeline HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n"
    b'{"inputs": 1}'
)
SOUND = np.zeros(240, np.float32)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


class HostileManager(ScriptedManager):
    """Refuses what the coordinator's own request manager refuses: values that cannot be encoded."""

    def admit(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        trace: str | None = None,
        trace_state: str | None = None,
        hook_result: TerminalStagesResult | None = None,
        prefer: AbstractSet[str] = frozenset(),
    ) -> ScriptedHandle:
        try:
            encoding.extract({"request": request}, where="submitted", as_fields=True)
        except ValueRefused as error:
            raise InvalidRequest(f"{error.path}: {error.problem}", param=error.path) from error
        return super().admit(
            request,
            timeout_s=timeout_s,
            trace=trace,
            trace_state=trace_state,
            hook_result=hook_result,
            prefer=prefer,
        )


async def answer(handle: ScriptedHandle) -> AsyncIterator[Event]:
    """The outputs that the request's kind has."""
    inputs = handle.request.inputs
    given: list[Any] = [Usage(1, 1)]
    match handle.request.kind:
        case "embedding":
            given.append(Vectors(np.zeros((len(inputs.get("texts") or inputs["tokens"]), 2), np.float32)))
        case "score":
            given.append(Scores([0.5] * len(inputs["pairs"])))
        case "image":
            given += [Image(PNG)] * inputs["n"]
        case "tokenize":
            given.append(Note("tokens", {"tokens": [1, 2], "max_model_len": 8}))
        case "detokenize":
            given.append(Text("ok"))
        case _:
            given += [Text("ok"), Audio(SOUND, 24_000)]
    yield ResultEvent(stage="talk", data=given)


# --- what is drawn ------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    "messages role content type text input_audio data format image_url url audio modalities stream stream_options "
    "timeout temperature stop n logit_bias metadata user tools inputs params input voice speed response_format "
    "stream_format include_usage id seed name prompt suffix echo tokens max_tokens max_output_tokens instructions "
    "previous_response_id store text_1 text_2 query documents top_n return_documents dimensions encoding_format size "
    "quality response_id logprobs top_logprobs add_special_tokens return_token_strs metadata truncate".split()
)
NUMBERS = st.sampled_from(
    ["0", "-0.0", "1", "-1", "1e308", "1e309", "-1e999", "9" * 25, "9" * 400, "0.1", "1E5", "01", "+1", ".5", "NaN"]
)
NUMBERS |= st.integers().map(str)
STRINGS = st.text(max_size=20).map(lambda text: msgspec.json.encode(text).decode())
STRINGS |= st.sampled_from(
    [
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\\u0000"',
        '"\x01"',
        '"data:image/png;base64,AAAA"',
        '"data:image/png,%41"',
        '"data:,"',
        '"http://127.0.0.1:1/a.png"',
        '"http://[::"',
        '"http://\\u0000/"',
        '"file:///etc/passwd"',
        '"text"',
        '"user"',
        '"audio"',
        '"mp3"',
        '"pcm16"',
        '"sse"',
        '"wav\\n"',
    ]
)
ATOMS = st.sampled_from(["null", "true", "false", "NaN", "Infinity", "-Infinity", "undefined", ""]) | NUMBERS | STRINGS


def _object(pairs: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{msgspec.json.encode(key).decode()}:{value}" for key, value in pairs) + "}"


#: JSON as text, so that it may be what no JSON library writes: keys twice, NaN, halves of characters.
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(KEYS | st.text(max_size=5), inner), max_size=4).map(_object)
        | st.tuples(st.sampled_from([70, 900, 4000]), inner).map(lambda deep: "[" * deep[0] + deep[1] + "]" * deep[0])
        | st.tuples(st.sampled_from([300, 20_000]), ATOMS).map(lambda many: f"[{','.join([many[1]] * many[0])}]")
    ),
    max_leaves=8,
)
#: Near enough to a good body for what lies behind the first check.
GOOD = {
    "/v1/chat/completions": [("messages", '[{"role":"user","content":"hi"}]')],
    "/v1/pipeline": [("inputs", "1")],
    "/v1/audio/speech": [("input", '"hi"')],
    "/v1/completions": [("prompt", '"hi"')],
    "/v1/responses": [("input", '"hi"')],
    "/v1/embeddings": [("input", '["a","b"]')],
    "/v1/rerank": [("query", '"q"'), ("documents", '["a","b"]')],
    "/v1/score": [("text_1", '"q"'), ("text_2", '["a","b"]')],
    "/v1/images/generations": [("prompt", '"hi"')],
    "/tokenize": [("prompt", '"hi"')],
    "/detokenize": [("tokens", "[1,2]")],
}
BAD_PARTS = st.lists(st.tuples(KEYS, VALUES), max_size=3)
CHAT_PARTS = st.lists(st.lists(st.tuples(KEYS, VALUES), max_size=3).map(_object), max_size=2).map(
    lambda parts: [("messages", f'[{{"role":"user","content":[{",".join(parts)}]}}]')]
)
TOKENS = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=12)
LATIN = st.binary(max_size=30)
ODD_HEADERS = [
    *b"chunked 100-continue close upgrade h2c websocket 0 1 -1 1e400 nan null cross-site Bearer".split(),
    *(b"", b"5" * 5000, b"x" * 9000, b"multipart/form-data", b"multipart/form-data; boundary=b", b"text/plain"),
]
HEADER_NAMES = st.sampled_from(
    b"x-request-id x-request-timeout traceparent authorization content-type origin sec-fetch-site host cookie expect "
    b"connection upgrade transfer-encoding content-length range x-forwarded-for accept-encoding".split()
)
HEADERS = st.lists(
    st.tuples(HEADER_NAMES | TOKENS.map(str.encode) | LATIN, LATIN | st.sampled_from(ODD_HEADERS)), max_size=3
)
ODD_PATHS = [
    *"/v1/models /v1/models/x /v1/requests/x /livez /readyz /status /metrics /openapi.json / * //v1/pipeline".split(),
    *"/v1/pipeline/ /v1/../v1/pipeline /v1/pipeline?x=%zz http://h/v1/models /v1/models/%ED%A0%80".split(),
    *f"/v1/requests/{'x' * 129} /v1/requests/%00 /v1/requests/%ff%fe /v1/requests/a%2fb /v1/requests/\\ud800".split(),
]
SERVED = st.sampled_from([*GOOD, "/v1/audio/transcriptions"])
PATHS = SERVED | SERVED | st.sampled_from(ODD_PATHS)
METHODS = st.sampled_from(["POST"] * 2 + "GET DELETE PUT PATCH HEAD OPTIONS TRACE CONNECT QUERY".split())
FORM_NAMES = st.sampled_from(
    "file inputs params stream language timeout response_format include[] prompt temperature timestamp_granularities[] "
    "image image[] mask n size quality".split()
)
FORMS = ["/v1/pipeline", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"]
FILES = st.sampled_from([b"", b'; filename="f"', b'; filename="\xff"', b"; filename*=utf-8''x", b"; filename="])


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    pieces = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(FORM_NAMES.map(str.encode) | LATIN | st.just(b"n" * 300))
        file = draw(FILES)
        more = draw(st.sampled_from([b"", b"\r\nContent-Type: \x00", b"\r\nX: " + b"y" * 5000, b"\r\nnonsense"]))
        data = draw(st.binary(max_size=20) | VALUES.map(lambda text: text.encode("utf-8", "surrogatepass")))
        pieces.append(b'--b\r\nContent-Disposition: form-data; name="' + name + b'"' + file + more + b"\r\n\r\n" + data)
    body = b"\r\n".join(pieces) + draw(st.sampled_from([b"\r\n--b--\r\n", b"\r\n--b--", b"\r\n--b", b""]))
    return body


def raw_request(path: str, body: bytes, headers: list[tuple[bytes, bytes]], method: str = "POST") -> bytes:
    head = b"".join(b"%s: %s\r\n" % header for header in [(b"host", b"localhost"), *headers])
    return f"{method} {path} HTTP/1.1\r\n".encode() + head + b"content-length: %d\r\n\r\n" % len(body) + body


JSON = (b"content-type", b"application/json")
FORM = (b"content-type", b"multipart/form-data; boundary=b")
GOOD_FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--b--\r\n'
GOOD_EDIT = (
    b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhi\r\n'
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="f"\r\n\r\n' + PNG + b"\r\n--b--\r\n"
)


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@st.composite
def odd_bodies(draw: st.DrawFn) -> bytes:
    """JSON to a route that takes it, near to what it takes."""
    path = draw(st.sampled_from(sorted(GOOD)))
    base = draw(CHAT_PARTS) if path == "/v1/chat/completions" and draw(st.booleans()) else GOOD[path]
    text = draw(VALUES) if draw(st.integers(0, 9)) == 9 else _object([*base, *draw(BAD_PARTS)])
    return raw_request(path, as_bytes(text), [JSON])


@st.composite
def odd_headers(draw: st.DrawFn) -> bytes:
    """A good request but for some headers."""
    path = draw(SERVED)
    body = as_bytes(_object(GOOD[path])) if path in GOOD else GOOD_FORM
    return raw_request(path, body, [JSON if path in GOOD else FORM, *draw(HEADERS)])


@st.composite
def odd_forms(draw: st.DrawFn) -> bytes:
    path = draw(st.sampled_from(FORMS))
    good = GOOD_EDIT if path == "/v1/images/edits" else GOOD_FORM
    body = draw(forms()) if draw(st.booleans()) else good
    if body is good and draw(st.booleans()):  # a whole form, and odd parts before it
        body = draw(forms()).removesuffix(b"--").removesuffix(b"\r\n--b") + b"\r\n" + good
    return raw_request(path, body, [FORM])


@st.composite
def odd_paths(draw: st.DrawFn) -> bytes:
    body = draw(st.binary(max_size=50))
    return raw_request(draw(PATHS), body, draw(st.sampled_from([[], [JSON]])), draw(METHODS))


@st.composite
def torn(draw: st.DrawFn) -> bytes:
    """Any of these, chunked, cut off, or with noise in it."""
    raw = draw(odd_bodies() | odd_headers() | odd_forms() | odd_paths())
    head, _, body = raw.partition(b"\r\n\r\n")
    match draw(st.sampled_from(["chunked", "cut", "noise", "old"])):
        case "chunked":
            head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
            size = draw(st.sampled_from([b"%x" % len(body), b"%x;ext=1" % len(body), b"-1", b"g", b"f" * 17, b""]))
            return head + b"\r\n\r\n" + size + b"\r\n" + body + b"\r\n0\r\nx-trailer: 1\r\n\r\n"
        case "cut":
            return raw[: draw(st.integers(0, len(raw)))]
        case "noise":
            at = draw(st.integers(0, min(len(raw), 300)))
            return raw[:at] + draw(st.binary(min_size=1, max_size=8)) + raw[at:]
    return raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1)


# --- what is held against it --------------------------------------------------------------------------------------


class Checked:
    """One server for all examples: what one leaves behind would be met by the next."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop
        self.seen: Counter[int] = Counter()  #: Status -> answers.

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    async def check(self, raw: bytes) -> None:
        """Send ``raw``; then an innocent request on a connection of its own."""
        self.seen[judge(await self._answer_to(raw), raw)] += 1
        status = 0
        for _ in range(3):  # a busy machine may let the short time for a head pass
            status = status or judge(await self._answer_to(INNOCENT), INNOCENT)
        assert status == 200

    async def _answer_to(self, raw: bytes) -> bytes:
        """All that is answered: one whole answer, or up to the connection's end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        answer = b""
        try:
            writer.write(raw)
            async with asyncio.timeout(PATIENCE_S):
                while not is_whole(answer, raw) and (piece := await reader.read(65_536)):
                    answer += piece
        except ConnectionError:
            pass  # closed on us in mid-writing
        finally:
            writer.transport.abort()
        return answer


def is_whole(answer: bytes, raw: bytes) -> bool:
    head, ended, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return is_whole(body, raw)
    length = re.search(rb"content-length: (\d+)", head.lower())
    if not ended or raw.startswith(b"HEAD"):
        return bool(ended)
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


def judge(answer: bytes, raw: bytes) -> int:
    """The answer's status; 0: none came, as what was sent is not a whole request."""
    while answer.startswith(b"HTTP/1.1 100"):
        answer = answer.partition(b"\r\n\r\n")[2]
    if not answer:
        return 0
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert status in STATUSES, (status, body[:300], raw[:300])
    if status >= 400 and not raw.startswith(b"HEAD"):
        assert b"application/json" in head, (answer[:500], raw[:500])
        error = msgspec.json.decode(body[: int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])])["error"]
        assert error["code"] in CODES, error
        assert error["code"] != "stage_failed" and len(body) < 20_000, error
    return status


def served(settings: WebSettings) -> Callable[[Callable[[Checked], None]], None]:
    def call(work: Callable[[Checked], None]) -> None:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()

            async def opened() -> tuple[CodecPool, Server]:
                codecs = CodecPool()
                server = Server(
                    make_app(HostileManager(answer, cap=50), settings, codecs=codecs), port=0, drain_s=0.5, limits=QUICK
                )
                return await codecs.__aenter__(), await server.__aenter__()

            codecs, server = runner.run(opened())
            try:
                work(Checked(server, loop))
            finally:
                runner.run(server.__aexit__(None, None, None))
                runner.run(codecs.__aexit__(None, None, None))

    return call


FAMILIES = {
    "bodies": odd_bodies(),
    "headers": odd_headers(),
    "forms": odd_forms(),
    "paths": odd_paths(),
    "torn": torn(),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_a_client_sends_is_answered_and_the_next_one_is_served(family: str) -> None:
    def work(checked: Checked) -> None:
        @settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
        @given(raw=FAMILIES[family])
        def each(raw: bytes) -> None:
            checked.run(checked.check(raw))

        each()
        assert len(checked.seen) > 1, checked.seen  # not refused all by the same first check

    served(msgspec.structs.replace(LIMITED, local=True))(work)


def test_the_property_finds_a_fault() -> None:
    """The control: an answer that is a fault of ours is not taken for a refusal."""
    broken = errors.encoded(RequestError("stage_failed", "internal error"), "r")
    with pytest.raises(AssertionError):
        judge(b"HTTP/1.1 500 x\r\ncontent-type: application/json\r\n\r\n" + broken, b"POST")
    with pytest.raises(AssertionError):
        judge(b"HTTP/1.1 400 x\r\ncontent-type: text/plain\r\n\r\nno", b"POST")
