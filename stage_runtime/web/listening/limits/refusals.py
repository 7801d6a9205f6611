"""The answer to a request that is refused before there is one for the application: its bytes. Pure.

Called by `connections` and `socket_connections`.
"""

from __future__ import annotations

from typing import Final

from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges import errors

_PHRASES: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
}


def encoded(error: RequestError, status: int) -> bytes:
    """The whole answer; the connection ends with it."""
    body = errors.encoded(error, None)
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n"
    )
    extra = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in errors.headers(error))
    return f"{head}{extra}\r\n".encode() + body
