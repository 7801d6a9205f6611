"""The helpers of a request over inputs that a pipeline's client has written: nothing has checked these."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.errors import InvalidRequest
from stage_runtime.wire.values import OmniRequest

PLACE = "inputs.messages[1]"


def asked(*messages: Any) -> OmniRequest:
    return OmniRequest(id="r", inputs={"messages": [{"role": "system", "content": "be brief"}, *messages]})


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (1, f"{PLACE}: expected an object, got int"),
        ([], f"{PLACE}: expected an object, got list"),
        ({"role": "user", "content": 5}, f"{PLACE}.content: expected a text or a list of objects"),
        ({"role": "user", "content": {"text": "hi"}}, f"{PLACE}.content: expected a text or a list of objects"),
        ({"role": "user", "content": ["hi"]}, f"{PLACE}.content: expected a text or a list of objects"),
    ],
)
def test_messages_of_another_form_are_refused_with_their_place_by_every_helper(message: Any, problem: str) -> None:
    request = asked(message)
    for helper in (request.messages, request.last_text, request.media):
        with pytest.raises(InvalidRequest) as refused:
            helper()
        assert (str(refused.value), refused.value.param) == (problem, "inputs")


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": 5}])
def test_a_text_part_without_a_text_is_refused_as_the_clients_fault(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^inputs.messages: a part of type text holds no text$"):
        asked({"role": "user", "content": [part]}).last_text()


def test_a_message_without_a_content_has_no_parts_and_no_text() -> None:
    request = asked({"role": "user"}, {"role": "assistant", "content": None})
    assert [item["content"] for item in request.messages()] == [[{"type": "text", "text": "be brief"}], [], []]
    assert (request.last_text(), request.media()) == ("", [])
