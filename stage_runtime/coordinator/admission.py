"""What must be known of a request before anything is sent: its terminals, its encoded body, its deadline, its retries.

Whatever is refused here has touched nobody. Called by the desk alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from omnipipeline_spec.plan import CoordinatorPlan, PipelineRevision
from stage_runtime.errors import RequestError, ValueRefused
from stage_runtime.relays import payloads
from stage_runtime.relays.payloads import Extracted
from stage_runtime.rules import routing
from stage_runtime.wire.values import OmniRequest

KEPT_NBYTES: Final = 512 << 20  # bodies kept for a retry, all requests together; beyond it a request has none


class Admitted(msgspec.Struct, frozen=True):
    """A request that may be sent."""

    terminals: tuple[str, ...]
    extracted: Extracted
    timeout_s: float
    retries: int


class Admission:
    """The pipeline's terms."""

    def __init__(self, plan: CoordinatorPlan, terminal_stages: Callable[[OmniRequest], Any] | None) -> None:
        self._plan = plan
        self._terminal_stages = terminal_stages
        self.kept_nbytes = 0  #: Of bodies that requests in flight keep.

    def admit(self, request: OmniRequest, revision: PipelineRevision, timeout_s: float | None) -> Admitted:
        """Raises: RequestError: a value that cannot travel (400), or terminalStagesFn is wrong (500)."""
        terminals = self._terminals(request, revision)
        try:
            # No ``data``: at the entry stage that is the request's own inputs, which would be encoded twice.
            extracted = payloads.extract({"request": request}, where="submitted", as_fields=True)
        except ValueRefused as error:
            told = str(error).removeprefix("submitted.")
            raise RequestError("invalid_request", told, request_id=request.id) from error
        limit_s = self._plan.request_timeout_s
        retries = self._plan.retries if self.kept_nbytes + extracted.nbytes <= KEPT_NBYTES else 0
        self.kept_nbytes += extracted.nbytes
        return Admitted(terminals, extracted, limit_s if timeout_s is None else min(timeout_s, limit_s), retries)

    def ended(self, extracted: Extracted) -> None:
        """A request is over; its body is kept no longer."""
        self.kept_nbytes -= extracted.nbytes

    def _terminals(self, request: OmniRequest, revision: PipelineRevision) -> tuple[str, ...]:
        if self._terminal_stages is None:
            return revision.terminals
        try:
            return routing.terminals(revision.terminals, self._terminal_stages(request))
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                "stage_failed",
                f"terminal_stages_fn: {type(error).__name__}: {error}",
                hook="terminal_stages_fn",
                request_id=request.id,
            ) from error
