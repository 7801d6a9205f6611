"""How errors look over HTTP: OpenAI's shape plus ``stage`` and ``request_id``. Pure; called by every route."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from stage_runtime.errors import RequestError

Headers = list[tuple[bytes, bytes]]

#: OpenAI's ``type`` of an error, by our code; everything else is a ``server_error``.
TYPES: Final[dict[str, str]] = {
    "invalid_request": "invalid_request_error",
    "context_length_exceeded": "invalid_request_error",
    "unauthorized": "authentication_error",
    "unsupported_endpoint": "invalid_request_error",
    "not_found": "invalid_request_error",
    "duplicate_request": "invalid_request_error",
    "too_large": "invalid_request_error",
    "cancelled": "cancelled_error",
    "rate_limited": "rate_limit_error",
}

LOGGED: Final = 300  # characters of an error's message in the log

#: Seconds for Retry-After where the request manager names none: a restarted stage process is back within about this
#: time.
RETRY_AFTER_S: Final = 1.0


class RequestRefused(RequestError):
    """An error of the closed list with another status than its code's: 403, 408, 415."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(code, message, param=param)
        self._status = status

    @property
    def status(self) -> int:
        return self._status


def body(error: RequestError, request_id: str | None) -> dict[str, Any]:
    """``{"error": {...}}`` as clients get it, alone or as an event of a stream."""
    facts: dict[str, Any] = {
        "message": _shown(error.message, 2000),
        "type": TYPES.get(error.code, "server_error"),
        "code": error.code,
        "param": None if error.param is None else _shown(error.param, 200),
        "stage": error.stage,
        "request_id": error.request_id or request_id,
    }
    if error.hook is not None:
        facts["hook"] = error.hook
    return {"error": facts}


def _shown(text: Any, most: int) -> str:
    """A client's or an author's text for JSON: shortened, lone surrogates replaced."""
    whole = str(text)
    short = whole if len(whole) <= most else f"{whole[:most]}…"
    return short.encode("utf-8", "replace").decode()


def logged(error: RequestError) -> dict[str, Any]:
    """The facts of an error for the request's line in the log: which parameter, what was wrong with it, in which stage.

    The outcome and the status are there already.
    """
    facts = {"param": error.param, "stage": error.stage, "message": error.message}
    return {name: _shown(value, LOGGED) for name, value in facts.items() if value is not None}


def encoded(error: RequestError, request_id: str | None) -> bytes:
    return msgspec.json.encode(body(error, request_id))


def headers(error: RequestError) -> Headers:
    """Headers beside the status: when to retry, or that the connection ends."""
    if error.code in ("rate_limited", "unavailable"):
        seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        return [(b"retry-after", str(max(1, math.ceil(seconds))).encode())]
    if error.code == "stage_failed" or (error.code == "deadline" and error.status == 504):
        # The openai client would send it twice more, to fail twice more. A 408 did not arrive: that may be repeated.
        return [(b"x-should-retry", b"false")]
    return [(b"www-authenticate", b"Bearer")] if error.code == "unauthorized" else []


def internal(request_id: str | None) -> RequestError:
    """The answer to a client for a fault of this program; the log has the cause."""
    return RequestError("stage_failed", "internal error; the server's log has it", request_id=request_id)
