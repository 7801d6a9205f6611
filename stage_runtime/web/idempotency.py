"""Requests that a client sends again under the same ``Idempotency-Key``: one answer, computed once, on one coordinator.

Here: which keys this process knows, the answers that it keeps, and the exchange that claims a key. Not here: other
coordinators, which know nothing of these keys: a request that is sent to another one runs anew there. Called by
`routing`, on the routes that take requests of the pipeline.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.exchanges import threads
from stage_runtime.web.exchanges.errors import Headers
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import multipart

HEADER: Final = "idempotency-key"
KEY_LIMIT: Final = 255
REPLAYED: Final = (b"idempotent-replayed", b"true")  # as Stripe's API says it
KEPT_S: Final = 600.0  # the official client's longest retry begins after less than a minute
KEPT_NBYTES: Final = 16 << 20  # of all answers; the oldest goes first
ANSWER_NBYTES: Final = 1 << 20  # a larger answer is computed anew
OVERHEAD_NBYTES: Final = 1024  # of an entry beside its answer, so that small answers are bounded, too
APART_NBYTES: Final = 1 << 20  # 0.5 ms of hashing; more is done on another thread

Name = bytes  # digest of a route, an API key and the client's key


class KeptAnswer(msgspec.Struct, frozen=True):
    """An answer as it was sent, and the digest of the body that it answers."""

    asked: bytes
    body: bytes
    content_type: bytes
    headers: Headers
    until: float

    @property
    def nbytes(self) -> int:
        return len(self.body) + OVERHEAD_NBYTES


class Repeats:
    """The keys of requests that run here, and the answers of those that have ended lately."""

    def __init__(self, *, kept_nbytes: int = KEPT_NBYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = kept_nbytes
        self._running: set[Name] = set()
        self._kept: OrderedDict[Name, KeptAnswer] = OrderedDict()  #: Oldest first.
        self.kept_nbytes = 0

    async def once(self, exchange: Exchange, handler: Callable[[Exchange], Awaitable[None]]) -> None:
        """Call ``handler``, unless the exchange repeats a request that runs, or whose answer is kept.

        Raises: RequestError: duplicate_request: the first one runs, or had another body; invalid_request: not a key.
        """
        key = _key(exchange)
        if key is None:
            await handler(exchange)
            return
        name = _name(exchange, key)
        if name in self._running:
            raise RequestError("duplicate_request", f"a request with this {HEADER} is running", param=HEADER)
        self._forget_old()
        boundary = multipart.boundary_of(exchange.header(b"content-type"))
        claim = exchange.claim = _Claim(self._kept.get(name), boundary, self._clock)
        self._running.add(name)
        try:
            await handler(exchange)
        except _Answered as repeat:
            exchange.claim, known = None, repeat.known
            await exchange.reply(known.body, content_type=known.content_type, headers=[*known.headers, REPLAYED])
        finally:
            self._running.remove(name)
            exchange.claim = None
            if claim.answer is not None:
                self._keep(name, claim.answer)

    def _keep(self, name: Name, answer: KeptAnswer) -> None:
        before = self._kept.pop(name, None)  # one whose body was not compared: a text that is spoken while it comes
        self.kept_nbytes += answer.nbytes - (0 if before is None else before.nbytes)
        self._kept[name] = answer
        self._forget_old()

    def _forget_old(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            if self.kept_nbytes <= self._most and self._kept[oldest].until > now:
                return
            self.kept_nbytes -= self._kept.pop(oldest).nbytes


class _Answered(Exception):
    """The body is that of the request whose answer is kept. Passes through the handler, which has begun nothing."""

    def __init__(self, known: KeptAnswer) -> None:
        self.known = known


class _Claim:
    """One exchange under a key: it compares the body, and takes the answer."""

    def __init__(self, known: KeptAnswer | None, boundary: bytes, clock: Callable[[], float]) -> None:
        """boundary: of the parts of a form; empty: the body is not one."""
        self._known = known
        self._boundary = boundary
        self._clock = clock
        self._asked = b""
        self.answer: KeptAnswer | None = None

    async def read(self, body: bytes) -> None:
        """The whole body is here. Raises: _Answered, RequestError: duplicate_request, unavailable."""
        if len(body) > APART_NBYTES:
            self._asked = await threads.call(_digest, body, self._boundary)
        else:
            self._asked = _digest(body, self._boundary)
        if self._known is None:
            return
        if self._known.asked != self._asked:
            problem = f"a request with this {HEADER} has had another body"
            raise RequestError("duplicate_request", problem, param=HEADER)
        raise _Answered(self._known)

    def replied(self, body: bytes, status: int, content_type: bytes, headers: Headers) -> None:
        """The whole answer is about to be sent. Errors are not kept: the client asks again for another outcome."""
        if status == 200 and len(body) <= ANSWER_NBYTES:
            self.answer = KeptAnswer(self._asked, body, content_type, headers, self._clock() + KEPT_S)


def _digest(body: bytes, boundary: bytes) -> bytes:
    """The boundary of a form counts for nothing: clients draw another one when they send the same form again."""
    digest = hashlib.sha256()
    for piece in body.split(b"--" + boundary, multipart.MAX_PARTS + 1) if boundary else (body,):
        digest.update(piece)
        digest.update(b"--")
    return digest.digest()


def _key(exchange: Exchange) -> str | None:
    """Raises: InvalidRequest: it is there twice, empty, longer than `KEY_LIMIT`, or not printable."""
    key = exchange.only_header(HEADER.encode())
    if key is not None and not (0 < len(key) <= KEY_LIMIT and key.isascii() and key.isprintable()):
        raise InvalidRequest(f"{HEADER}: 1 to {KEY_LIMIT} printable ASCII characters are expected", param=HEADER)
    return key


def _name(exchange: Exchange, key: str) -> Name:
    """A client with another API key has other requests under the same key."""
    parts = (exchange.path, exchange.header(b"authorization") or "", key)
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
