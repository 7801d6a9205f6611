"""A stage tells a request's owner that all its input is here, however soon the engine has done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from stage_runtime.engines.base import Inbox
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.inputs.stage_input import InputOutcomes, StageInput
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire.parts import Header
from tests.stage.stage_kit import plan

HEADER = Header("r", 1, "c", {}, None, streamed=True)


class QuickInbox(Inbox):
    """An inbox whose engine is done with each item at once, as on a thread that overtakes this one."""

    def __init__(self, happens: Callable[[RequestWork], object]) -> None:
        super().__init__(lambda work, error: None)
        self._happens = happens

    def put(self, arrival: Any) -> None:
        self._happens(arrival.work)


def unused(*_: Any) -> Any:
    raise AssertionError("not in this test")


@pytest.mark.parametrize(
    ("happens", "reported"),
    [(lambda work: None, ["r"]), (RequestWork.finish, ["r"]), (RequestWork.abort, [])],
    ids=["nothing", "finished", "aborted"],
)
def test_input_is_reported_unless_the_request_was_aborted(
    happens: Callable[[RequestWork], object], reported: list[str]
) -> None:
    made, told = plan("b", inputs_from=("a",)), list[str]()
    stage = StageInput(
        made,
        Hooks(made),
        QuickInbox(happens),
        InputOutcomes(
            fail=unused,
            crashed=unused,
            skipped=unused,
            unwanted=unused,
            reject=unused,
            complete=lambda work: told.append(work.request_id),
        ),
    )
    stage.payload(HEADER, "a", cast(Any, object()))
    assert told == reported
