"""An answer's text through the parser of a form, however it is cut into pieces."""

from __future__ import annotations

from typing import Any

from stage_runtime.engines.autoregressive.text.tool_calls.call_forms import FORMS
from stage_runtime.engines.autoregressive.text.tool_calls.call_parsers import Asked, Parser
from stage_runtime.engines.autoregressive.text.tool_calls.calls import Call

NAMES = frozenset({"f", "g"})


def parser_of(form: str, **asked: Any) -> Parser:
    return FORMS[form].parser(Asked(**{"names": NAMES, **asked}))


def parsed(form: str, *pieces: str, cut: bool = False, **asked: Any) -> tuple[str, list[Call]]:
    """The text beside calls, and the calls. cut: a bound of tokens has ended the answer."""
    parser, whole = parser_of(form, **asked), "".join(pieces)
    found = [*map(parser.feed, pieces), parser.flush(cut=cut)]
    text = "".join(whole[begin:end] for spans, _calls in found for begin, end in spans)
    return text, [call for _spans, calls in found for call in calls]
