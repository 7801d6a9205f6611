"""The operator's errors; a class exists where some caller acts differently on it.

OperatorError
├── ConfigurationError    the operator's own settings; the process ends
├── NotAllowed            the author's: the operator does not allow what the spec asks for; reported, not retried
└── ClusterError          an answer of the API server, or none
    ├── NotFound          404
    ├── Conflict          409: the name is taken, or the object has changed
    ├── Invalid           422: the object itself is refused, or its uid is another
    ├── Forbidden         401, 403: RBAC, quota, pod security, a terminating namespace; any refusal of a webhook
    └── Unavailable       429, 5xx, refused connections, timeouts: a retry may succeed
"""

from __future__ import annotations

import re


class OperatorError(Exception):
    """Base of all errors that the operator raises."""


class ConfigurationError(OperatorError):
    """The operator's own settings are wrong; names the variable."""


class NotAllowed(OperatorError):
    """The spec asks for something that this operator does not allow."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        self.message = message
        super().__init__(f"{path}: {message}")


class ClusterError(OperatorError):
    """A request to the API server failed. ``status`` is 0 when it was not answered."""

    def __init__(self, what: str, status: int, message: str, *, reason: str = "", retry_after_s: float = 0.0) -> None:
        self.what = what  #: Verb and object, for logs and conditions.
        self.status = status
        self.message = message
        self.reason = reason  #: The API server's reason, such as AlreadyExists.
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}: {message} ({status})" if status else f"{what}: {message}")


class NotFound(ClusterError):
    """The object does not exist."""


class Conflict(ClusterError):
    """The name is taken, or the object has changed."""


class Invalid(ClusterError):
    """The object is invalid."""


class Forbidden(ClusterError):
    """Refused by RBAC, a quota, pod security or an admission webhook, or because the namespace is terminating."""


class Unavailable(ClusterError):
    """No answer, or one that asks for a retry."""


#: Server-side apply answers an unknown field, and a value of a wrong type, with a 500 and this message.
_UNTYPED = "failed to create typed patch object"
#: Admission webhooks refuse with any status, many with a 500; one that does not answer, and may not be passed over, is
#: a 500 too. Each stands in the way of its own kinds alone, so the status must say so, and other children go on.
_WEBHOOK = re.compile("failed calling webhook|admission webhook .* denied the request")


def of_status(what: str, status: int, message: str, *, reason: str = "", retry_after_s: float = 0.0) -> ClusterError:
    """The error of an HTTP status."""
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
    if _WEBHOOK.search(message):
        kind = Forbidden
    return kind(what, status, message, reason=reason, retry_after_s=retry_after_s)
