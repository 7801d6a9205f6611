"""Facts of a request that are needed before anything is sent: terminals, encoded body, deadline, retries.

A request that is refused here has sent nothing. Called by the request manager alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_spec.types.plan import CoordinatorPlan, PipelineRevision
from stage_runtime.coordinator.admitting.terminal_stages import HOOK, TerminalStagesResult
from stage_runtime.errors import InvalidRequest, RequestError, ValueRefused, describe
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Extracted
from stage_runtime.rules.flow.gathering import names_of
from stage_runtime.rules.graph import routing
from stage_runtime.rules.requests.failures import failure_of
from stage_runtime.wire.values import OmniRequest, RequestKind

KEPT_NBYTES: Final = 512 << 20  # bodies kept for a retry, all requests together; beyond it a request has none


class Admitted(msgspec.Struct, frozen=True):
    """A request that may be sent."""

    terminals: tuple[str, ...]
    extracted: Extracted
    timeout_s: float
    retries: int


class Admission:
    """Applies the pipeline's limits (deadline, retries, memory kept for retries) to each new request."""

    def __init__(self, plan: CoordinatorPlan, terminal_stages: Callable[[OmniRequest], Any] | None) -> None:
        self._plan = plan
        self._terminal_stages = terminal_stages
        self.kept_nbytes = 0  #: Encoded bodies that requests in flight keep for a retry.

    def admit(
        self, request: OmniRequest, revision: PipelineRevision, wanted: Collection[str] | None, timeout_s: float
    ) -> Admitted:
        """wanted: of `wanted_terminals`. timeout_s: what is left of the request's time.

        Raises: RequestError: a value that cannot be encoded (400).
        """
        terminals = tuple(name for name in revision.terminals if wanted is None or name in wanted)
        try:
            # No ``data``: at the entry stage that is the request's own inputs, which would be encoded twice.
            extracted = encoding.extract({"request": request}, where="submitted", as_fields=True)
        except ValueRefused as error:
            place = _as_written(error.path.removeprefix("submitted.").removeprefix("request."), request.kind)
            raise InvalidRequest(f"{place}: {error.problem}", param=place) from error
        retries = self._plan.retries if self.kept_nbytes + extracted.nbytes <= KEPT_NBYTES else 0
        return Admitted(terminals, extracted, timeout_s, retries)

    def timeout_s(self, asked_s: float | None) -> float:
        """How long a request may take in all."""
        limit_s = self._plan.request_timeout_s
        return limit_s if asked_s is None else min(asked_s, limit_s)

    def begun(self, extracted: Extracted) -> None:
        """A request is admitted for good: its encoded body is kept until `ended`."""
        self.kept_nbytes += extracted.nbytes

    def ended(self, extracted: Extracted) -> None:
        """A request has ended: release its encoded body."""
        self.kept_nbytes -= extracted.nbytes

    def wanted_terminals(
        self, request: OmniRequest, revisions: Sequence[PipelineRevision], hook_result: TerminalStagesResult | None
    ) -> tuple[str, ...] | None:
        """The terminals that the request waits for; None: all of them.

        revisions: that are served, newest last: one must have these terminals. hook_result: of terminalStagesFn; None:
            it is called here.
        Raises: RequestError: terminalStagesFn is wrong (500).
        """
        if self._terminal_stages is None or not revisions:
            return None
        try:
            returned = hook_result.value() if hook_result is not None else self._terminal_stages(request)
            if returned is None:
                return None
            names = set(names_of(returned) or ())
            serving = next((one for one in reversed(revisions) if names <= set(one.terminals)), revisions[-1])
            return routing.terminals(serving.terminals, returned)
        except RequestError as error:
            failure = failure_of(error, "", HOOK)
            raise RequestError(
                failure.code,
                failure.message,
                stage=failure.stage or None,
                hook=failure.hook,
                param=failure.param,
                request_id=request.id,
            ) from error
        except BaseException as error:  # SystemExit too: it is one request
            raise RequestError(
                "stage_failed",
                f"{HOOK}: {describe(error)}",
                hook=HOOK,
                request_id=request.id,
            ) from error


def _as_written(path: str, kind: RequestKind) -> str:
    """A place of a request as the client named it: only a pipeline's body has ``params`` and ``inputs``."""
    if kind == "pipeline":
        return path
    return re.sub(r"\['([^']*)'\]", r".\1", path).removeprefix("params.").removeprefix("inputs.")
