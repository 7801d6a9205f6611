"""POST /v1/responses: the body as that of a chat, whose requests these are. Answers: `response_items`. Pure.

Nothing is stored, so what refers to an earlier response is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.reading import responses_body, schemas
from stage_runtime.web.translating.generation import parameters

DECODER: Final = msgspec.json.Decoder(responses_body.ResponsesBody)

#: name -> (values that are defaults, why anything else is refused)
REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "store": ((False,), "nothing is stored; send store: false, and the items of earlier turns as input"),
    "previous_response_id": ((), "nothing is stored; send the items of earlier turns as input"),
    "conversation": ((), "nothing is stored; send the items of earlier turns as input"),
    "background": ((False,), "nothing is stored; ask for a stream"),
    "prompt": ((), "no prompts are kept here; send input and instructions"),
    "truncation": (("disabled",), "a prompt that is too long is refused"),
    "top_logprobs": ((0,), "responses have no log probabilities; /v1/chat/completions has"),
    "max_tool_calls": ((), "tools are called by the client, who counts the calls"),
}
#: Fields of a chat, and where a response has them.
_NAMES: Final = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
)
_INCLUDED: Final = ("reasoning.encrypted_content",)  # nothing is encrypted: what was thought is shown
_PARTS: Final = ("input_text", "input_image", "input_audio", "output_text", "refusal")
_TYPES: Final = ("message", "function_call", "function_call_output", "reasoning")


class ChatInput(msgspec.Struct, frozen=True):
    """A body as that of a chat. places: of the items from which its messages were made."""

    body: schemas.ChatBody
    places: tuple[str, ...]

    def rename(self, error: RequestError) -> None:
        """Make an error about the chat's body, a stage's too, one about the client's."""
        names = [(f"messages[{index}]", place) for index, place in enumerate(self.places)]
        for theirs, ours in (*names, *_NAMES):
            if error.param is not None and error.param.startswith(theirs):
                error.message = error.message.replace(theirs, ours)
                error.param = ours + error.param.removeprefix(theirs)
                return


def decode(raw: bytes) -> responses_body.ResponsesBody:
    return schemas.decode(raw, responses_body.ResponsesBody, DECODER)


def chat_input(body: responses_body.ResponsesBody) -> ChatInput:
    """Raises: InvalidRequest: names the parameter."""
    parameters.refuse(body, REFUSED)
    for index, one in enumerate(body.include or ()):
        if one not in _INCLUDED:
            raise InvalidRequest(f"include[{index}]: {one!r} is not known here", param=f"include[{index}]")
    messages, places = _messages(body)
    text = body.text or responses_body.TextOptions()
    made = schemas.ChatBody(
        messages=messages,
        model=body.model,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        max_completion_tokens=body.max_output_tokens,
        response_format=None if text.format is None else _format(text.format),
        verbosity=text.verbosity,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        tools=[_tool(one, index) for index, one in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        metadata=body.metadata,
        timeout=body.timeout,
    )
    return ChatInput(made, tuple(places))


# --- input --------------------------------------------------------------------------------------------------------


def _messages(body: responses_body.ResponsesBody) -> tuple[list[schemas.Message], list[str]]:
    found: list[schemas.Message] = []
    places: list[str] = []
    if body.instructions is not None:
        found.append(schemas.Message(role="system", content=body.instructions))
        places.append("instructions")
    if isinstance(body.input, str):
        return [*found, schemas.Message(role="user", content=body.input)], [*places, "input"]
    thought = ""
    for index, given in enumerate(body.input):
        place = f"input[{index}]"
        item = _item(given, place)
        last = found[-1] if found and found[-1].role == "assistant" else None
        match item:
            case responses_body.ReasoningItem():
                thought += "".join(one.text for one in item.content or ())
                continue
            case responses_body.FunctionCall() if last is not None and not thought:
                if last.tool_calls is None:
                    last.tool_calls = []
                last.tool_calls.append(_call(item))
                continue
            case responses_body.FunctionCall():
                message = schemas.Message(role="assistant", tool_calls=[_call(item)])
            case responses_body.FunctionCallOutput():
                output = item.output if isinstance(item.output, str) else "".join(one.text for one in item.output)
                message = schemas.Message(role="tool", content=output, tool_call_id=item.call_id)
            case responses_body.InputMessage():
                message = schemas.Message(role=item.role, content=_content(item, place))
            case responses_body.ItemReference():
                raise InvalidRequest(f"{place}: nothing is stored; send the item itself", param=place)
        if message.role == "assistant" and thought:
            message.reasoning_content = thought
        thought = ""
        found.append(message)
        places.append(place)
    if not places or places == ["instructions"]:
        raise InvalidRequest("input: expected a text or items, got none", param="input")
    return found, places


def _item(given: dict[str, Any], place: str) -> responses_body.Item:
    kind = given.get("type", "message")
    if kind not in (*_TYPES, "item_reference"):
        problem = f"{place}.type: {str(kind)[:80]!r} is not known here; known are {', '.join(_TYPES)}"
        raise InvalidRequest(problem, param=f"{place}.type")
    try:
        found: responses_body.Item = msgspec.convert({**given, "type": kind}, responses_body.Item)
        return found
    except msgspec.ValidationError as error:
        refused = schemas.refusal(str(error), responses_body.ResponsesBody)
        inner = refused.param or ""
        name = f"{place}{'' if inner.startswith('[') or not inner else '.'}{inner}"
        problem = refused.message.removeprefix(f"{inner or 'body'}: ")
        if re.search(r"\]\.type$", inner):
            problem = f"{problem.partition(';')[0]}; known are {', '.join(_PARTS)}"
        raise InvalidRequest(f"{name}: {problem}", param=name) from None


def _content(item: responses_body.InputMessage, place: str) -> str | list[schemas.ContentPart]:
    if isinstance(item.content, str):
        return item.content
    return [_part(part, f"{place}.content[{index}]") for index, part in enumerate(item.content)]


def _part(part: responses_body.Part, place: str) -> schemas.ContentPart:
    match part:
        case responses_body.Refusal():
            return schemas.RefusalPart(part.refusal)
        case responses_body.InputSound():
            return schemas.AudioPart(part.input_audio)
        case responses_body.InputImage(image_url=str() as url):
            return schemas.ImageUrlPart(schemas.Url(url))
        case responses_body.InputImage():
            raise InvalidRequest(f"{place}.image_url: required, as no files are kept here", param=f"{place}.image_url")
    return schemas.TextPart(part.text)


def _call(item: responses_body.FunctionCall) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


# --- parameters ---------------------------------------------------------------------------------------------------


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    """``text.format`` as a chat's ``response_format``."""
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _tool(given: Mapping[str, Any], index: int) -> dict[str, Any]:
    place = f"tools[{index}]"
    if given.get("type") != "function":
        problem = (
            f"{place}.type: expected 'function', as this server runs no tools, got {str(given.get('type'))[:80]!r}"
        )
        raise InvalidRequest(problem, param=f"{place}.type")
    if not isinstance(given.get("name"), str):
        raise InvalidRequest(f"{place}.name: required", param=f"{place}.name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: given[name] for name in names if given.get(name) is not None}}


def _choice(given: Any) -> Any:
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, dict) and given.get("type") == "function" and isinstance(given.get("name"), str):
        return {"type": "function", "function": {"name": given["name"]}}
    problem = "tool_choice: expected 'auto', 'none', 'required' or {'type': 'function', 'name': …}"
    raise InvalidRequest(problem, param="tool_choice")
