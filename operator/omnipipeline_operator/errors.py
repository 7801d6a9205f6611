"""The operator's errors; a class exists where some caller acts differently on it.

OperatorError
├── ConfigurationError    the operator's own settings; the process ends
├── Refused               the author's: what was asked for is not allowed here; reported, not retried
└── ClusterError          an answer of the API server, or none
    ├── NotFound          404
    ├── Conflict          409: the name is taken, or the object is not the one we knew
    ├── Invalid           422: the object itself is refused, or its uid is another
    ├── Forbidden         401, 403: RBAC, quota, pod security, a terminating namespace
    └── Unavailable       429, 5xx, refused connections, timeouts: later, perhaps
"""

from __future__ import annotations


class OperatorError(Exception):
    """Anything the operator raises itself."""


class ConfigurationError(OperatorError):
    """The operator's own settings are wrong; names the variable."""


class NotAllowed(OperatorError):
    """The author asked for something that this operator does not allow."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        self.message = message
        super().__init__(f"{path}: {message}")


class ClusterError(OperatorError):
    """The API server did not do what was asked. ``status`` is 0 when there was no answer."""

    def __init__(self, what: str, status: int, message: str, *, reason: str = "", retry_after_s: float = 0.0) -> None:
        self.what = what  #: Verb and object, for logs and conditions.
        self.status = status
        self.message = message
        self.reason = reason  #: The API server's own word, such as AlreadyExists.
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}: {message} ({status})" if status else f"{what}: {message}")


class NotFound(ClusterError):
    """There is no such object."""


class Conflict(ClusterError):
    """The name is taken, or the object is not the one that was meant."""


class Invalid(ClusterError):
    """The object was refused as it is."""


class Forbidden(ClusterError):
    """Not allowed: by RBAC, by a quota, by pod security, in a namespace that is going."""


class Unavailable(ClusterError):
    """No answer, or one that says: later."""


#: What server-side apply answers, with a 500, to a field that no schema has and to a value of another type.
_UNTYPED = "failed to create typed patch object"


def of_status(what: str, status: int, message: str, *, reason: str = "", retry_after_s: float = 0.0) -> ClusterError:
    """The error that an HTTP status stands for."""
    kinds: dict[int, type[ClusterError]] = {
        401: Forbidden,
        403: Forbidden,
        404: NotFound,
        409: Conflict,
        410: Unavailable,
        422: Invalid,
        429: Unavailable,
    }
    kind = kinds.get(status, Unavailable if status >= 500 or status == 0 else Invalid)
    if _UNTYPED in message:
        kind = Invalid
    return kind(what, status, message, reason=reason, retry_after_s=retry_after_s)
