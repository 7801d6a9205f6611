"""Tools that a model may call: how they are offered to it, and its calls in the text. Pure.

The form here is Hermes': ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, which most chat templates with tools
ask for. A list of calls inside one pair of tags is read, too. The other forms are in `call_forms`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from stage_runtime.engines.autoregressive.text.detokenizer import StopStrings
from stage_runtime.engines.autoregressive.text.grammar_texts import WRITTEN
from stage_runtime.errors import InvalidRequest

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
MOST: Final = 128  # OpenAI's bound
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
MOST_VALUES: Final = 1 << 17  # as of a body, in which arguments are text: millions of lists take seconds of a step

INSTRUCTIONS: Final = """You may call functions. Their signatures, as JSON inside <tools> tags:
<tools>
{tools}
</tools>
To call one, answer with JSON in this form, and nothing else:
{sample}"""


class Call(NamedTuple):
    """arguments: JSON, as text."""

    name: str
    arguments: str


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


def forced(params: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The functions of which one must be called, by ``tool_choice``; empty: none need be.

    Raises: InvalidRequest.
    """
    choice = params.get("tool_choice")
    if choice in (None, "auto", "none"):
        return []
    if not tools:
        raise InvalidRequest("tool_choice: there are no tools", param="tool_choice")
    named = choice.get("function") if isinstance(choice, Mapping) else None
    if choice != "required" and not isinstance(named, Mapping):
        raise InvalidRequest(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}",
            param="tool_choice",
        )
    wanted = [tool["function"] for tool in tools if named is None or tool["function"]["name"] == named.get("name")]
    if not wanted:
        raise InvalidRequest("tool_choice names no tool of the request", param="tool_choice")
    return wanted


def grammar(
    functions: Sequence[Mapping[str, Any]],
    before: str = f'"{BEGIN}\\n"',
    after: str = f'"\\n{END}"',
    arguments: str = "arguments",
) -> str:
    """One call of one of these, in Lark's form. before, after: of the call. arguments: by which name it has them."""
    rules = []
    for index, function in enumerate(functions):
        schema = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
            "x-guidance": WRITTEN,
        }
        rules.append(f"call_{index}: %json {json.dumps(schema)}")
    calls = " | ".join(f"call_{index}" for index in range(len(rules)))
    return "\n".join([f"start: {before} call {after}", f"call: {calls}", *rules])


def check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Before they are read. Raises: InvalidRequest: the arguments of earlier calls have too many values."""
    texts = [text for message in messages for text in _arguments(message.get("tool_calls"))]
    if sum(1 + text.count(",") + text.count("[") + text.count("{") for text in texts) > MOST_VALUES:
        raise InvalidRequest(
            f"messages: the arguments of earlier calls have more than {MOST_VALUES} values", param="messages"
        )


def _arguments(calls: Any) -> Iterator[str]:
    """What `spoken` will read. Not what is no call: it refuses that."""
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        text = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(text, str):
            yield text


def spoken(call: Any, index: int) -> dict[str, Any]:
    """An earlier call as templates read it, whose arguments are an object.

    Raises: InvalidRequest: ``messages[index]`` has no such call.
    """
    try:
        function = call["function"]
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
        return {**call, "function": {**function, "name": str(function["name"]), "arguments": arguments}}
    except (KeyError, TypeError, AttributeError, msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"messages[{index}].tool_calls: no calls of functions", param="messages") from error


def instructions(tools: Sequence[Mapping[str, Any]], sample: str) -> str:
    """For a model whose chat template takes no tools. sample: a call."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool) for tool in tools), sample=sample)


def names(tools: Any) -> frozenset[str]:
    """Of what an author gives a chat template as tools: of functions, or of objects that have one each."""
    given = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return frozenset(str(one["name"]) for one in given if isinstance(one, Mapping) and "name" in one)


class CallParser:
    """Takes calls out of a text as it comes."""

    def __init__(self) -> None:
        self._tags = StopStrings([BEGIN])
        self._inside: str | None = None  #: What has come after a begin; None: outside.
        self._read = 0  #: Characters of it in which no call ends.

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The text beside calls, and the calls that are whole. What is no JSON stays text.

        An end tag inside a string of a call's JSON ends no call.
        """
        shown, calls = "", []
        while text or self._inside is not None:
            if self._inside is None:
                given, found = self._tags.feed(text)
                shown += given
                if found is None:
                    break
                text, self._inside, self._read = self._tags.rest(), "", 0
            self._inside += text
            text = ""
            end = self._inside.find(END, self._read)
            if end < 0:
                self._read = max(self._read, len(self._inside) - len(END) + 1)
                break
            body = self._inside[:end]
            made = calls_in(body)
            if not made and _ends_in_string(body):
                self._read = end + len(END)
                continue
            text, self._inside = self._inside[end + len(END) :], None
            calls += made
            shown += "" if made else f"{BEGIN}{body}{END}"
        return shown, calls

    def flush(self) -> tuple[str, list[Call]]:
        """At the end: a call that is whole but for its end tag counts."""
        shown, calls = "", list[Call]()
        while self._inside is not None:
            body, self._inside = self._inside, None
            if made := calls_in(body):
                return shown, calls + made
            body, end, rest = body.partition(END)  # it was no string, or one that has no end
            shown += BEGIN + body + end
            text, found = self.feed(rest)
            shown, calls = shown + text, calls + found
        return shown + self._tags.flush(), calls


def _ends_in_string(body: str) -> bool:
    """Whether this may be the beginning of JSON that goes on inside a string."""
    if not body.lstrip().startswith(("{", "[")):
        return False
    return _ESCAPED.sub("", body).count('"') % 2 == 1


def calls_in(body: str) -> list[Call]:
    """The calls of a JSON value; empty: it is none, or no JSON."""
    try:
        found = msgspec.json.decode(body.strip())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return []
    calls = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return []
        arguments = one.get("arguments", one.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(one["name"], arguments))
    return calls
