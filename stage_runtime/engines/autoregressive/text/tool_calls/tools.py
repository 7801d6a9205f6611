"""Tools that a model may call, and earlier calls of them: what a request says of both, checked. Pure.

The forms in which models write calls are in `call_forms`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stage_runtime.engines.autoregressive.text.tool_calls import calls
from stage_runtime.errors import InvalidRequest

MOST: Final = 128  # OpenAI's bound
MOST_VALUES: Final = 1 << 17  # as of a body, in which arguments are text: millions of lists take seconds of a step

INSTRUCTIONS: Final = """You may call functions. Their signatures, as JSON inside <tools> tags:
<tools>
{tools}
</tools>
To call one, answer with JSON in this form, and nothing else:
{sample}"""


def offered(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request, checked. None when ``tool_choice`` is ``none``.

    Raises: InvalidRequest.
    """
    tools = params.get("tools")
    if not tools or params.get("tool_choice") == "none":
        return []
    if not isinstance(tools, list | tuple) or len(tools) > MOST:
        raise InvalidRequest(f"tools must be a list of at most {MOST} functions", param="tools")
    return [_checked(tool, index) for index, tool in enumerate(tools)]


def _checked(tool: Any, index: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise InvalidRequest(f"tools[{index}] must be {{'type': 'function', 'function': {{…}}}}", param="tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"tools[{index}].function.name: required", param="tools")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise InvalidRequest(f"tools[{index}].function.parameters must be a JSON schema", param="tools")
    return {"type": "function", "function": dict(function)}


def forced(params: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of the tools of which one must be called, by ``tool_choice``; empty: none need be.

    Raises: InvalidRequest.
    """
    choice = params.get("tool_choice")
    if choice in (None, "auto", "none"):
        return []
    if not tools:
        raise InvalidRequest("tool_choice: goes with tools, and the request has none", param="tool_choice")
    named = choice.get("function") if isinstance(choice, Mapping) else None
    if choice != "required" and not isinstance(named, Mapping):
        raise InvalidRequest(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}",
            param="tool_choice",
        )
    wanted = [
        index for index, tool in enumerate(tools) if named is None or tool["function"]["name"] == named.get("name")
    ]
    if not wanted:
        raise InvalidRequest("tool_choice names no tool of the request", param="tool_choice")
    return wanted


def check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Called before the messages are read.

    Raises: InvalidRequest: the arguments of earlier calls have too many values.
    """
    texts = [text for message in messages for text in _arguments(message.get("tool_calls"))]
    if sum(1 + text.count(",") + text.count("[") + text.count("{") for text in texts) > MOST_VALUES:
        raise InvalidRequest(
            f"messages: the arguments of earlier calls have more than {MOST_VALUES} values", param="messages"
        )


def _arguments(earlier: Any) -> Iterator[str]:
    """The texts that `spoken` will read. It refuses what is not a call."""
    for call in earlier if isinstance(earlier, list | tuple) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        text = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(text, str):
            yield text


def spoken(call: Any, index: int, number: int = 0) -> dict[str, Any]:
    """An earlier call as templates read it, whose arguments are an object.

    Raises: InvalidRequest: ``messages[index].tool_calls[number]`` is not a call of a function; it says why.
    """
    place = f"messages[{index}].tool_calls[{number}]"
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f"{place}: expected {{'type': 'function', 'function': {{'name': …, 'arguments': …}}}}", param=place
        )
    arguments = calls.arguments_of(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def instructions(tools: Sequence[Mapping[str, Any]], sample: str) -> str:
    """The text that tells a model of its tools when its chat template takes none. sample: a call."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool) for tool in tools), sample=sample)


def names(tools: Any) -> frozenset[str]:
    """The tools among what an author gives a chat template: functions, or objects that have one each."""
    given = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return frozenset(str(one["name"]) for one in given if isinstance(one, Mapping) and "name" in one)
