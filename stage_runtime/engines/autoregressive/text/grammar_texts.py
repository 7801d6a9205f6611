"""A grammar as text, and how JSON is written in one. Made by `parameters` and `tools`, compiled by `grammars`."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

#: As models write JSON. Without it they may write blanks for ever.
WRITTEN: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must follow. text: a JSON schema, or a grammar in Lark's form."""

    kind: Literal["json_schema", "lark"]
    text: str
