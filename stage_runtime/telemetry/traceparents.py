"""W3C trace context: which trace a request belongs to, and whether it is sampled. Pure but for random ids.

Source: https://www.w3.org/TR/trace-context/, version 00; the ratio: OpenTelemetry's TraceIdRatioBased sampler.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

import msgspec

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: Members are vendors' business; what no header field may hold and what exceeds the specification's bound is dropped.
_STATE: Final = re.compile(r"[ -~\t]{1,512}")
_SAMPLED: Final = 0x01


class TraceContext(msgspec.Struct, frozen=True, kw_only=True):
    """One request's place in a trace. Ids are lowercase hex."""

    trace_id: str
    span_id: str  #: The id of the request's own span.
    parent_id: str | None  #: The id of the client's span.
    sampled: bool
    state: str = ""  #: The client's ``tracestate``: passed on, never read.

    @property
    def header(self) -> str:
        """The ``traceparent`` for whatever works on the request."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def begin(given: str | None, *, ratio: float, state: str | None = None) -> TraceContext:
    """A request's context: of the client's trace, which decides on sampling, or of a trace of its own.

    state: the client's ``tracestate``; of no meaning without its trace.
    ratio: of the requests without a client's trace, how many are sampled.
    """
    parent = _parse(given) if given is not None else None
    if parent is not None:
        trace_id, parent_id, sampled = parent
        kept = state if state is not None and _STATE.fullmatch(state) else ""
        return TraceContext(trace_id=trace_id, span_id=new_span_id(), parent_id=parent_id, sampled=sampled, state=kept)
    trace_id = secrets.token_hex(16)
    sampled = int(trace_id[16:], 16) < ratio * (1 << 64)
    return TraceContext(trace_id=trace_id, span_id=new_span_id(), parent_id=None, sampled=sampled)


def new_span_id() -> str:
    return secrets.token_hex(8)


def stage_span_id(request_span_id: str, stage: str) -> str:
    """The id of the span of a stage's stay. The stage's process gives it to its author's spans as parent, the
    coordinator sends it.
    """
    return hashlib.blake2b(f"{request_span_id}/{stage}".encode("utf-8", "replace"), digest_size=8).hexdigest()


def sampled_parent(header: str | None) -> tuple[str, str] | None:
    """(trace, the request's span) of a `TraceContext.header`; None: it is not sampled."""
    found = _parse(header) if header is not None else None
    return found[:2] if found is not None and found[2] else None


def _parse(given: str) -> tuple[str, str, bool] | None:
    """(trace, span, sampled); None where the specification requires a new trace."""
    found = _FORM.fullmatch(given)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, bool(int(flags, 16) & _SAMPLED)
