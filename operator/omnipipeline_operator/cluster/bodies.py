"""Bodies of requests that the API server, or kubectl, reads as YAML: JSON that means the same to a YAML reader.

Here: one encoder, pure. Not here: sending them (`client`, `kubectl.access`). JSON's own escapes are not enough: a YAML
reader takes the two halves of a surrogate pair for two invalid characters, refuses control characters, reads U+0085,
U+2028 and U+2029 as line breaks, and takes no key of more than 1,024 characters.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_PLAIN_KEY: Final = 150  # characters; each may be escaped as six of the 1,024
_REPLACEMENT: Final = "\\ufffd"  # what the API server's own reader makes of half of a surrogate pair
_OF_THE_BASIC_PLANE: Final = re.compile("[\x7f-\uffff]")
_NESTED: Final = (dict, list, tuple)  # what json writes as an object or as a list
_TEXT_OR_KEY: Final = re.compile(r'("(?:[^"\\]|\\.)*")(:?)')


def encode(value: Any) -> str:
    """The value as JSON that is YAML, too. Half of a surrogate pair becomes U+FFFD; a long key is marked by ``? ``."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii() or "\x7f" in text:
        text = _OF_THE_BASIC_PLANE.sub(_escaped, text)
    return _TEXT_OR_KEY.sub(_with_mark, text) if _has_long_key(value) else text


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return _REPLACEMENT if "\ud800" <= character <= "\udfff" else f"\\u{ord(character):04x}"


def _has_long_key(value: Any) -> bool:
    """Loops over dicts and lists alone: with `any` over all values it took most of the time of an encoding."""
    if isinstance(value, dict):
        for key, item in value.items():
            if len(str(key)) > MAX_PLAIN_KEY or (isinstance(item, _NESTED) and _has_long_key(item)):
                return True
    elif isinstance(value, _NESTED):
        for item in value:
            if isinstance(item, _NESTED) and _has_long_key(item):
                return True
    return False


def _with_mark(found: re.Match[str]) -> str:
    text, colon = found.groups()
    return f"? {text} : " if colon and len(text) > MAX_PLAIN_KEY else str(found[0])
