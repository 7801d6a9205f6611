"""The events of one stage's payloads, made once for its profiles: `recorder.note` takes them."""

from __future__ import annotations

from typing import Any, Final

from omnipipeline_spec.types.plan import StagePlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler import events
from stage_runtime.profiler.templates import Template


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
    """`left_and_started`: the engine takes a payload from its queue and begins at once. `complete`: the run has ended,
    and its result is handed on. `handed_on`: and it is sent to the one target.
    """

    def __init__(self, plan: StagePlan) -> None:
        following = [] if plan.terminal else list(plan.next)
        complete = {"terminal": plan.terminal, "next": following}
        starts: tuple[str, dict[str, Any]] = (events.STAGE_RUN_START, {})
        self.run_start = Template(plan.name, starts)
        self.left_and_started = Template(plan.name, _LEAVES, starts, number="depth", numbered=0)
        ended: tuple[tuple[str, dict[str, Any]], ...] = (
            (events.STAGE_RUN_END, {}),
            (events.STAGE_COMPLETE, complete),
        )
        sent = {target: (events.STAGE_HOP_SENT, {"to_stage": target}) for target in plan.next}
        self.complete = Template(plan.name, *ended)
        self.sent = {target: Template(plan.name, event) for target, event in sent.items()}
        self.handed_on = {target: Template(plan.name, *ended, event) for target, event in sent.items()}
