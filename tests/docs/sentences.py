"""The sentences of docstrings, comments and pages, without code: what a reader of the project reads."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

#: The end of a sentence: a capital follows, behind quotes or a mark of Markdown.
_END = re.compile(r"(?<=[.!?])[\"')*`]* (?=[\"'(*`]*[A-Z])")
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Paragraph(NamedTuple):
    line: int
    text: str

    def sentences(self) -> list[str]:
        parts = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", self.text))
        return [one for part in parts if part for one in _END.split(part)]


def of_python(text: str) -> Iterator[Paragraph]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and (found := ast.get_docstring(node, clean=False)) is not None:
            yield Paragraph(node.body[0].lineno, found)
    yield from _comments(text)


def of_page(text: str) -> Iterator[Paragraph]:
    """Paragraphs, items of lists and cells of tables; no headings, code or HTML."""
    lines: list[str] = []
    begin, code = 0, False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        bare = line.strip()
        fence = bare.startswith("```")
        code ^= fence
        item = _ITEM.match(line)
        if lines and (code or fence or item or not bare or bare.startswith(("#", "|", "<"))):
            yield Paragraph(begin, " ".join(lines))
            lines = []
        if code or fence or not bare or bare.startswith(("#", "<")):
            continue
        if bare.startswith("|"):
            yield from (Paragraph(number, cell.strip()) for cell in bare.strip("|").split(" | "))
            continue
        begin = begin if lines else number
        lines.append(line[item.end() :] if item else bare)


def _comments(text: str) -> Iterator[Paragraph]:
    """Comments: lines below each other are one, unless the next one begins with ``#:`` or stands behind code."""
    block: list[str] = []
    begin = last = column = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, start = token.start
        words = token.string.lstrip("#").lstrip(":").strip()
        alone = not token.line[:start].strip()
        if block and alone and (line, start) == (last + 1, column):
            block.append(words)
        else:
            if block:
                yield Paragraph(begin, " ".join(block))
            block, begin, column = [words], line, start if alone else -1
        last = line
    if block:
        yield Paragraph(begin, " ".join(block))
