"""The events of one stage's payloads, made once for its profiles: `recorder.note` takes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from omnipipeline_spec.types.plan import StagePlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler import events
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.profiler.recording.templates import Template
from stage_runtime.stage.work import RequestWork

MOST_SETS: Final = 64  # of targets that routeFn chooses, with a template: a template is kept for ever


def leaving(plan: StagePlan) -> Template:
    """The engine takes a payload from its queue; with the queue's depth."""
    return Template(plan.name, _LEAVES, number="depth")


_LEAVES: Final = (events.STAGE_QUEUE_LEAVE, {"kind": "payload"})


class InputEvents:
    """`arrived`: the payload of a source, which begins the request here; with the queue's depth. `received`: one of
    several. `merged`: all of those are here.
    """

    def __init__(self, plan: StagePlan) -> None:
        begins: tuple[tuple[str, dict[str, str]], ...] = (
            (events.STAGE_DISPATCH, {}),
            (events.STAGE_QUEUE_ENTER, {"kind": "payload"}),
        )
        received = {
            source: (events.STAGE_INPUT_RECEIVED, {"from_stage": source}) for source in (COORDINATOR, *plan.inputs_from)
        }
        self.received = {source: Template(plan.name, event) for source, event in received.items()}
        self.arrived = {
            source: Template(plan.name, event, *begins, number="depth") for source, event in received.items()
        }
        self.merged = Template(plan.name, (events.STAGE_AGGREGATE_READY, {}), *begins, number="depth")


class OutputEvents:
    """`left_and_started`: the engine takes a payload from its queue and begins at once. `handed_on`: the run has ended,
    and its result is sent to the one target.
    """

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        starts: tuple[str, dict[str, Any]] = (events.STAGE_RUN_START, {})
        self.run_start = Template(plan.name, starts)
        self.left_and_started = Template(plan.name, _LEAVES, starts, number="depth", numbered=0)
        sent = {target: (events.STAGE_HOP_SENT, {"to_stage": target}) for target in plan.next}
        self._complete: dict[tuple[str, ...], Template] = {}  #: Templates by their targets.
        self.sent = {target: Template(plan.name, event) for target, event in sent.items()}
        self.handed_on = {target: Template(plan.name, *self._ended((target,)), event) for target, event in sent.items()}

    def note_complete(self, work: RequestWork, ended_ns: int, targets: Collection[str]) -> None:
        """The run has ended, and its result is handed on to ``targets``, of ``plan.next``. While a profile runs."""
        chosen = tuple(target for target in self._plan.next if target in targets)
        template = self._complete.get(chosen)
        if template is None and len(self._complete) < MOST_SETS:
            template = self._complete[chosen] = Template(self._plan.name, *self._ended(chosen))
        if template is not None:
            recorder.note(template, work.request_id, work.attempt, 0, ended_ns)
            return
        for place, (event, facts) in enumerate(self._ended(chosen)):  # in this order, as a template's events
            facts["attempt"] = work.attempt
            recorder.emit(event, work.request_id, self._plan.name, facts, timestamp_ns=ended_ns + place)

    def _ended(self, targets: tuple[str, ...]) -> tuple[tuple[str, dict[str, Any]], ...]:
        complete = {"terminal": self._plan.terminal, "next": list(targets)}
        return (events.STAGE_RUN_END, {}), (events.STAGE_COMPLETE, complete)
