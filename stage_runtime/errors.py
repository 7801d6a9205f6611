"""The error tree of the runtime. A class exists when some caller acts differently on it.

OmniError
├── RequestError            one request fails; carries a code of the closed list and what the client is told
│   └── InvalidRequest      the user's fault (400); stages may raise it
├── ValueRefused            LOCAL: a value that cannot travel, refused at the sender, names the path
├── PeerError               the other end's fault
│   ├── ProtocolError       a frame that cannot be understood: counted and dropped
│   └── TransferError       a relay could not move a payload (the request fails with transport_failed)
├── ConfigurationError      plan, environment or a dotted name is wrong: the process must not start
└── HookError               a user's function raised or broke its contract: stage, hook, cause
"""

from __future__ import annotations

from typing import Final

#: code -> HTTP status: the closed list that clients may count on.
CODES: Final[dict[str, int]] = {
    "invalid_request": 400,
    "unauthorized": 401,
    "unsupported_endpoint": 404,
    "not_found": 404,
    "duplicate_request": 409,
    "cancelled": 499,
    "too_large": 413,
    "rate_limited": 429,
    "stage_failed": 500,
    "transport_failed": 502,
    "unavailable": 503,
    "deadline": 504,
}


class OmniError(Exception):
    """Root of the runtime's errors."""


class RequestError(OmniError):
    """A request ends with this: ``code`` of `CODES`, the stage and hook that caused it, a message for the client."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        stage: str | None = None,
        hook: str | None = None,
        request_id: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code if code in CODES else "stage_failed"
        self.message = message
        self.stage = stage
        self.hook = hook
        self.request_id = request_id
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return CODES[self.code]


class InvalidRequest(RequestError):
    """The request cannot be served as it is: the client's fault. Stages raise it for input they refuse."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__("invalid_request", message, param=param)


class ValueRefused(OmniError):
    """A value that cannot be said in MessagePack; ``path`` is where it stands."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class PeerError(OmniError):
    """The other end's fault."""


class ProtocolError(PeerError):
    """A frame that cannot be understood: garbage, another protocol version, a field out of bounds."""


class OtherProtocol(ProtocolError):
    """A frame of another protocol version: nothing of it is believed but that."""


class TransferError(PeerError):
    """A relay could not move a payload."""


class ConfigurationError(OmniError):
    """Plan, environment or a dotted name is wrong: the process must not start."""


class HookError(OmniError):
    """A user's function raised, or gave back what its contract does not allow."""

    def __init__(self, stage: str, hook: str, message: str) -> None:
        super().__init__(f"{stage}.{hook}: {message}")
        self.stage = stage
        self.hook = hook
        self.message = message
