"""Fenced code blocks of a Markdown file, for the tests that hold the documentation to the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str) -> list[str]:
    """The text of each block of ``language`` in ``document`` (a path from the repository's root), in order."""
    text = (ROOT / document).read_text()
    return [body for kind, body in FENCE.findall(text) if kind == language]


def section(document: str, heading: str) -> str:
    """The text under ``heading``, up to the next one of the same or a higher level."""
    text = (ROOT / document).read_text()
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{document} has no section {heading!r}"
    return found.group(1)
