"""A grammar as text, and how JSON is written in one. Made by `parameters` and `call_forms`, compiled by `grammars`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from stage_runtime.errors import InvalidRequest

#: JSON as models write it. They may write blanks for ever without it.
WRITTEN: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST: Final = 1 << 16  #: Characters of a grammar.
ANY_OBJECT: Final = '{"type": "object"}'


class SchemaPart(msgspec.Struct, frozen=True):
    """A JSON schema as a rule of a grammar. Its references stay inside of it.

    place: of the schema in the request, for errors. text: the schema. needed: an answer must follow it; else any object
    will do in place of a schema that cannot be followed.
    """

    rule: str
    place: str
    text: str
    needed: bool = True


class Grammar(msgspec.Struct, frozen=True):
    """The grammar that an answer must follow. text: a JSON schema, a regular expression, or rules in Lark's form, to
    which those of ``parts`` belong.

    place: of what asks for it in the request, for errors. mark: a text in the rule ``mark``, which may be one special
    token. thinking: the model ``may`` think before the answer, or the prompt has ``begun`` its thinking; see
    `reasoning`.
    """

    kind: Literal["json_schema", "lark", "regex"]
    text: str
    place: str = "response_format"
    parts: tuple[SchemaPart, ...] = ()
    mark: str = ""
    thinking: Literal["", "may", "begun"] = ""

    @property
    def size(self) -> int:
        """Characters that are compiled."""
        return len(self.text) + sum(len(part.text) for part in self.parts)

    def lark(self, schemas: Mapping[str, Any], mark: str = "") -> str:
        """All rules, of the kind ``lark``. schemas: by rule. mark: another way to write the mark, as a rule has it."""
        marks = [f"mark: {json.dumps(self.mark)}{mark and f' | {mark}'}"] if self.mark else []
        written = (f"{name}: %json {json.dumps({**one, 'x-guidance': WRITTEN})}" for name, one in schemas.items())
        return "\n".join([self.text, *marks, *written])


class GrammarRefused(InvalidRequest, ValueError):
    """A grammar cannot be followed. place: of the field that asks for it."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}", param=place)
        self.place = place
