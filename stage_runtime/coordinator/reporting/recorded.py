"""The events of all requests at their coordinator, made once for its profiles: `recorder.note` takes them."""

from __future__ import annotations

from typing import Final, get_args

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler import events
from stage_runtime.profiler.recording.templates import Template
from stage_runtime.rules.requests.lifecycle import RequestState
from stage_runtime.wire.values import RequestKind

#: Events by the request's kind.
ADMISSION: Final = {
    kind: Template(COORDINATOR, (events.REQUEST_ADMISSION, {"kind": kind}), attempts=False)
    for kind in get_args(RequestKind)
}
#: Events by the state that the request ended in.
RESPONSE: Final = {
    state: Template(COORDINATOR, (events.TERMINAL_RESPONSE, {"state": state}), attempts=False)
    for state in ("running", *(state.value for state in RequestState))
}
