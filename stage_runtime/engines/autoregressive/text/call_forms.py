"""The forms in which models write calls of tools: how they are found in a text, and the grammar of a forced call. Pure.

``hermes``: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, see `tools`. ``json``: an answer that is
``{"name": …, "parameters": {…}}``, as of Llama 3; several follow each other. ``mistral``: ``[TOOL_CALLS]`` and a list
of such objects, or ``[TOOL_CALLS]name{…}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from stage_runtime.engines.autoregressive.text import tools
from stage_runtime.engines.autoregressive.text.detokenizer import StopStrings
from stage_runtime.engines.autoregressive.text.tools import Call, CallParser

MARK: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"  # between a name and its arguments; a special token, so mostly no text
_NAMED: Final = re.compile(r"\s*([\w.-]{1,64})(?:\[ARGS\])?\s*")
_OPENING, _CLOSING = frozenset("{["), frozenset("}]")
_BETWEEN: Final = " \t\r\n;,"  # what models write between calls


class Parser(Protocol):
    """Takes calls out of a text as it comes."""

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The text beside calls, and the calls that are whole."""

    def flush(self) -> tuple[str, list[Call]]:
        """At the end."""


class CallForm(NamedTuple):
    """parser: for calls of tools of these names. grammar: of one call of one of these functions, in Lark's form.

    sample: a call, for a model whose chat template takes no tools. mark: a special token that is kept in the text.
    """

    parser: Callable[[Collection[str]], Parser]
    grammar: Callable[[Sequence[Mapping[str, Any]]], str]
    sample: str
    mark: str = ""


class JSONCallParser:
    """Reads calls that are JSON where an answer begins, after ``mark``, and after another call.

    JSON that is no call of one of ``names`` stays text, as does what follows it.
    """

    def __init__(self, names: Collection[str], *, opening: str, mark: str = "") -> None:
        """opening: how a call may begin."""
        self._names = frozenset(names)
        self._opening = opening
        self._marks = StopStrings([mark])
        self._mark = mark
        self._text = False  #: What comes is text, until the next mark.
        self._marked = False  #: What is held follows a mark.
        self._held = ""  #: What may be the beginning of a call.
        self._called = False  #: It follows a call.
        self._reset()

    def _reset(self) -> None:
        self._read = 0  #: Letters of what is held that were read: a value begins there, and its depth at that place.
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> tuple[str, list[Call]]:
        shown, calls = "", []
        while text:
            if self._text:
                given, found = self._marks.feed(text)
                shown += given
                if found is None:
                    break
                text = self._marks.rest()
                self._hold_after_mark()
            self._held += text
            text = ""
            more, found_calls, text = self._look()
            shown += more
            calls += found_calls
        return shown, calls

    def flush(self) -> tuple[str, list[Call]]:
        shown, self._held = ("" if self._called and not self._held.strip(_BETWEEN) else self._raw()), ""
        return shown + self._marks.flush(), []

    def _hold_after_mark(self) -> None:
        self._text, self._marked, self._called, self._held = False, True, False, ""
        self._reset()

    def _raw(self) -> str:
        return (self._mark if self._marked else "") + self._held

    def _look(self) -> tuple[str, list[Call], str]:
        """Look at what is held. Returns: text, calls, and what is to be looked at again."""
        begin = self._begin()
        if begin is None:
            return "", [], ""
        if begin < 0:
            return self._give_up()
        end = self._end(begin)
        if end is None:
            return "", [], ""
        name = _NAMED.fullmatch(self._held[:begin].lstrip(_BETWEEN)) if self._marked else None
        calls = self._calls(self._held[begin:end], None if name is None else name[1])
        if not calls:
            return self._give_up()
        rest, self._held = self._held[end:], ""
        self._marked, self._called = False, True
        self._reset()
        return "", calls, rest

    def _give_up(self) -> tuple[str, list[Call], str]:
        """What is held is no call. It is text up to the next mark."""
        held, self._held, self._text = self._held, "", True
        shown, self._marked = self._mark if self._marked else "", False
        return shown, [], held

    def _begin(self) -> int | None:
        """Where a value begins in what is held. None: it may come. Below 0: what is held is no beginning of a call."""
        blank = _BETWEEN if self._called else " \t\r\n"
        at = len(self._held) - len(self._held.lstrip(blank))
        if at == len(self._held):
            return None
        if self._mark and not self._marked and self._held.startswith(self._mark[: len(self._held) - at], at):
            if len(self._held) - at < len(self._mark):
                return None
            self._held = self._held[at + len(self._mark) :]
            self._marked, self._called = True, False
            return self._begin()
        if self._held[at] in self._opening:
            return at
        if not self._marked:
            return -1
        named = _NAMED.match(self._held)
        place = self._held.find("{")
        if place >= 0:
            return place if named is not None and named.end() == place else -1
        whole = named is not None and (
            named.end() == len(self._held) or ARGUMENTS.startswith(self._held[named.end() :])
        )
        return None if whole else -1

    def _end(self, begin: int) -> int | None:
        """Where the value that begins there ends. None: it goes on."""
        for at in range(max(self._read, begin), len(self._held)):
            letter = self._held[at]
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._quoted = False
            elif letter == '"':
                self._quoted = True
            elif letter in _OPENING:
                self._depth += 1
            elif letter in _CLOSING:
                self._depth -= 1
                if not self._depth:
                    return at + 1
        self._read = len(self._held)
        return None

    def _calls(self, value: str, name: str | None) -> list[Call]:
        calls = tools.calls_in(value if name is None else f'{{"name": {json.dumps(name)}, "arguments": {value}}}')
        return calls if all(call.name in self._names for call in calls) else []


def _listed(functions: Sequence[Mapping[str, Any]]) -> str:
    return tools.grammar(functions, before='"["', after='"]"')


def _plain(functions: Sequence[Mapping[str, Any]]) -> str:
    return tools.grammar(functions, before="", after="", arguments="parameters")


FORMS: Final[dict[str, CallForm]] = {
    "hermes": CallForm(
        lambda names: CallParser(),
        tools.grammar,
        '<tool_call>\n{"name": "function\'s name", "arguments": {"argument": "value"}}\n</tool_call>',
    ),
    "json": CallForm(
        lambda names: JSONCallParser(names, opening="{"),
        _plain,
        '{"name": "function\'s name", "parameters": {"argument": "value"}}',
    ),
    "mistral": CallForm(
        lambda names: JSONCallParser(names, opening="[{", mark=MARK),
        _listed,
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
    if tools.BEGIN not in template and _LLAMA.search(template):
        return FORMS["json"]
    return FORMS["hermes"]
