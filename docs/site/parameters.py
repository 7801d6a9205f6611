"""An extension of griffe, which reads docstrings for the reference: lines such as ``name: meaning`` become a list."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

LINE: Final = re.compile(r"^(\w+): ", re.MULTILINE)


class Parameters(griffe.Extension):
    """Our docstrings give one line to a parameter, Markdown would join them to a paragraph."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = LINE.sub(r"- `\1`: ", obj.docstring.value)
