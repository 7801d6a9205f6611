"""Converts an exception of an author's code into a `Failure` and a log line. Nothing here raises.

The exception is untrusted: its texts and attributes may raise, have any type and any size. Called by `outbox`
for every failed request, by a TP stage's followers, and at admission.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from stage_runtime.errors import (
    CODES,
    HookError,
    NoConnection,
    ProtocolError,
    RequestError,
    RouteAway,
    TransferError,
    ValueRefused,
    describe,
    format_traceback,
    raised_at,
    safe_str,
)
from stage_runtime.wire.parts import NAME_LIMIT, Failure

PARAM_LIMIT = 200
INCARNATION: Final = re.compile(r"\b[0-9a-f]{16}\b")

log = logging.getLogger(__name__)


def failure_of(error: BaseException, stage: str, hook: str) -> Failure:
    """The failure that a client gets for ``error``. ``stage``, ``hook``: where it was raised; an error may name its
    own."""
    match error:
        case RouteAway():
            return Failure("unavailable", error.message, stage, "routeFn", away=error.away)
        case RequestError():
            code = _attribute(error, "code")
            param = _attribute(error, "param")
            return Failure(
                code if type(code) is str and code in CODES else "stage_failed",
                safe_str(_attribute(error, "message")),
                _name(error, "stage") or stage,
                _name(error, "hook") or hook,
                None if param is None else safe_str(param, limit=PARAM_LIMIT),
            )
        case HookError():
            message = safe_str(_attribute(error, "message"))
            return Failure("stage_failed", message, _name(error, "stage") or stage, _name(error, "hook") or hook)
        case ValueRefused():
            return Failure("stage_failed", safe_str(error), stage, hook)
        case NoConnection():
            return Failure("transport_failed", safe_str(error), stage, hook, unreachable=error.peer)
        case TransferError() | ProtocolError():
            return Failure("transport_failed", safe_str(error), stage, hook)
    return Failure("stage_failed", describe(error), stage, hook)


def for_client(failure: Failure, name_of: Callable[[str], str | None]) -> Failure:
    """The failure without names of processes, which mean nothing to a client and change with each start.

    name_of: what an incarnation is called instead; None: its name is not known.
    """
    message = INCARNATION.sub(lambda found: name_of(found[0]) or found[0], failure.message)
    return failure if message == failure.message else msgspec.structs.replace(failure, message=message)


def log_failure(request_id: str, failure: Failure, error: BaseException) -> None:
    """One line; with the traceback where an author's code raised something else than a refusal."""
    template = "request %s failed in %s.%s: %s"
    facts = (request_id, failure.stage, failure.hook, failure.message)
    try:
        if isinstance(error, RouteAway):
            log.debug("request %s: %s", request_id, failure.message)
        elif isinstance(error, RequestError):
            log.info(template, *facts)
        elif isinstance(error, ValueRefused | HookError) and error.__cause__ is None and not raised_at(error):
            log.error(template, *facts)  # a traceback would show the runtime's code, and what it was given is at fault
        else:
            log.error(template + "\n%s", *facts, format_traceback(error).rstrip())
    except BaseException:  # a logging handler failed: the request fails all the same
        pass


def _name(error: BaseException, attribute: str) -> str:
    """A stage's or hook's name; empty when the text could not be one."""
    value = _attribute(error, attribute)
    return safe_str(value, limit=NAME_LIMIT) if isinstance(value, str) else ""


def _attribute(error: BaseException, name: str) -> Any:
    try:
        return getattr(error, name)
    except BaseException as raised:
        return f"<{name} cannot be had: {describe(raised)}>" if name == "message" else None
