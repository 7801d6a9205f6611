"""The forms in which models write calls of tools: the parser of each, and the grammars of answers with calls. Pure.

``hermes``: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, which most chat templates with tools ask for.
``json``: an answer that is ``{"name": …, "parameters": {…}}``, as of Llama 3; several follow each other. ``mistral``:
``[TOOL_CALLS]`` and a list of such objects, or ``[TOOL_CALLS]name{…}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from stage_runtime.engines.autoregressive.text.structured_output import grammars, schemas, structured
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import (
    ANY_OBJECT,
    MOST,
    Grammar,
    SchemaPart,
)
from stage_runtime.engines.autoregressive.text.tool_calls import tools
from stage_runtime.engines.autoregressive.text.tool_calls.call_parsers import (
    BEGIN,
    END,
    MARK,
    Asked,
    CallParser,
    JSONCallParser,
    Parser,
)
from stage_runtime.errors import InvalidRequest


class CallForm(NamedTuple):
    """opening, between, closing: what stands around calls. arguments: by which name a call has them.

    sample: a call, for a model whose chat template takes no tools. mark: a special token that is kept in the text, and
    precedes calls where an answer may be something else. tagged: a call cannot be taken for JSON of anything else.
    """

    parser: Callable[[Asked], Parser]
    opening: str
    between: str
    closing: str
    arguments: str
    sample: str
    mark: str = ""
    tagged: bool = True


def _mistral(asked: Asked) -> Parser:
    return JSONCallParser(asked, opening="[{", mark=MARK, unmarked=not asked.structured)


FORMS: Final[dict[str, CallForm]] = {
    "hermes": CallForm(
        CallParser,
        f"{BEGIN}\n",
        f"\n{END}\n{BEGIN}\n",
        f"\n{END}",
        "arguments",
        '<tool_call>\n{"name": "function\'s name", "arguments": {"argument": "value"}}\n</tool_call>',
    ),
    "json": CallForm(
        partial(JSONCallParser, opening="{"),
        "",
        "; ",
        "",
        "parameters",
        '{"name": "function\'s name", "parameters": {"argument": "value"}}',
        tagged=False,
    ),
    "mistral": CallForm(
        _mistral,
        "[",
        ", ",
        "]",
        "arguments",
        '[{"name": "function\'s name", "arguments": {"argument": "value"}}]',
        MARK,
    ),
}
_LLAMA: Final = re.compile(r'<\|python_tag\|>|"name": function name, "parameters"')


def form_of(wanted: str, chat_template: Any) -> CallForm:
    """wanted: a name in `FORMS`, or ``auto``: what the chat template asks the model for."""
    if wanted != "auto":
        return FORMS[wanted]
    template = str(chat_template)
    if MARK in template:
        return FORMS["mistral"]
    if BEGIN not in template and _LLAMA.search(template):
        return FORMS["json"]
    return FORMS["hermes"]


# --- grammars -----------------------------------------------------------------------------------------------------


def grammar(params: Mapping[str, Any], form: CallForm) -> Grammar | None:
    """The grammar that an answer must follow: a forced call of a tool; or ``response_format``, beside calls of offered
    tools.

    Raises: InvalidRequest.
    """
    offered = tools.offered(params)
    forced = tools.forced(params, offered)
    if forced:
        return _grammar(form, [_call(form, offered, index, needed=True) for index in forced], place="tools")
    wanted = structured.wanted(params)
    if wanted is None or not offered:
        return wanted
    if wanted.kind != "json_schema":
        raise InvalidRequest(f"{wanted.place}: no form but JSON goes with tools that may be called", param=wanted.place)
    answer = wanted.text
    calls = [_call(form, offered, index, needed=False) for index in range(len(offered))]
    if sum(len(part.text) for _text, part in calls) + len(answer) > MOST:
        calls = [(text, SchemaPart(part.rule, part.place, ANY_OBJECT)) for text, part in calls]
    return _grammar(form, calls, answer=answer, place=wanted.place, several=_parallel(params))


def _grammar(
    form: CallForm,
    calls: Sequence[tuple[str, SchemaPart]],
    *,
    answer: str | None = None,
    several: bool = False,
    place: str = "response_format",
) -> Grammar:
    """calls: each as rules, and the schema of its arguments. answer: a schema that an answer may follow instead."""
    mark = "mark " if answer is not None and form.mark else ""
    more = f" ({_literal(form.between)} call)*" if several else ""
    rules = [
        "start: calls" + ("" if answer is None else " | answer"),
        f"calls: {mark}{_literal(form.opening)} call{more} {_literal(form.closing)}",
        f"call: {' | '.join(text for text, _part in calls)}",
    ]
    parts = [part for _text, part in calls]
    if answer is not None:
        parts.append(SchemaPart("answer", place, answer))
    return Grammar("lark", "\n".join(rules), place, tuple(parts), form.mark if mark else "")


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _call(form: CallForm, offered: Sequence[Any], index: int, *, needed: bool) -> tuple[str, SchemaPart]:
    """A call of one tool. Raises: InvalidRequest: an object cannot follow the schema of its arguments."""
    function, place = offered[index]["function"], f"tools[{index}].function.parameters"
    try:
        text = json.dumps(schemas.object_schema(function.get("parameters")))
    except (TypeError, ValueError, RecursionError) as error:
        if needed:
            raise InvalidRequest(f"{place}: {error}", param=place) from error
        text = ANY_OBJECT
    rule = f"arguments_{index}"
    # Cut as the compiler cuts JSON: a longer literal would take `{` from an answer of the client's schema.
    name = json.dumps(function["name"], ensure_ascii=False)
    words = ["{", '"name"', ": ", name, ", ", f'"{form.arguments}"', ": "]
    return f'{" ".join(map(json.dumps, words))} {rule} "}}"', SchemaPart(rule, place, text, needed)


# --- parsers ------------------------------------------------------------------------------------------------------


def _parallel(params: Mapping[str, Any]) -> bool:
    return params.get("parallel_tool_calls") is not False


def asked(params: Mapping[str, Any], given: Any, form: CallForm, *, thinking: bool = False) -> Asked | None:
    """The request's wishes for calls in its answers; None: the request has no tools.

    given: what the chat template gets as tools. thinking: the prompt has begun the model's thinking.
    """
    offered = tools.offered(params)
    names = tools.names(given or ()) | tools.names(offered)
    if not names:
        return None
    forced = bool(tools.forced(params, offered))
    wanted = None if forced or not offered else structured.wanted(params)
    answer = None if wanted is None else wanted.text
    ambiguous = answer is not None and not form.tagged and schemas.declares(answer, ("name", "parameters"))
    return Asked(
        names=names,
        forced=forced,
        most=0 if _parallel(params) else 1,
        structured=answer is not None,
        is_answer=grammars.follower(answer) if ambiguous and answer is not None else None,
        thinking=thinking,
    )
