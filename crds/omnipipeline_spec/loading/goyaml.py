"""YAML as ``kubectl`` reads it, so that one file means the same on a laptop and on a cluster.

Here: documents from text, with the line of every value. PyYAML scans and parses. Plain scalars are numbers, booleans or
strings as Go's sigs.k8s.io/yaml decides (a table test compares with a real kubectl). Input that Kubernetes accepts
silently is refused: a duplicate key, an alias that contains itself, a tag. Not here: what the documents mean
(`loading`). Facts, each measured with kubectl:

- ``y yes on true`` in lower, upper and title case are booleans, ``n no off false`` too; ``~`` and ``null`` are null
- ``0o17`` and ``017`` are 15, ``08`` is 8, ``0x1F`` 31, ``0b11`` 3, ``1_000`` 1000, ``1e3`` the integer 1000
- dates, ``12:30:45`` and ``1e400`` are strings; ``.inf`` and ``.nan`` are refused, because JSON has no such numbers
- all keys become strings: ``1:`` is "1", ``yes:`` is "true"
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import yaml

from omnipipeline_spec.types.canonical import INT_BOUND, MAX_LEVELS, MAX_VALUES, has_surrogate, join
from omnipipeline_spec.types.errors import UnreadableSpec

MAX_PATHS: Final = 64 << 20  # characters of the paths of all values: one key of 1 MB may be a part of very many
MAX_DIGITS: Final = 66  # of an integer of 64 bits: in binary, with its prefix

_WORDS: Final[Mapping[str, bool | None]] = {
    **{form: True for word in ("y", "yes", "on", "true") for form in (word, word.title(), word.upper())},
    **{form: False for word in ("n", "no", "off", "false") for form in (word, word.title(), word.upper())},
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
}
_NO_JSON: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER: Final = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|([1-9][0-9]*|0))")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
# Go parses a number that begins with a point by other code, which is stricter about underscores.
_POINT_FIRST: Final = re.compile(r"\.[0-9]+(_[0-9]+)*([eE][-+]?[0-9]+(_[0-9]+)*)?")
_TAG: Final = "tag:yaml.org,2002:"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One document of a file."""

    value: Any
    lines: Mapping[str, int]  #: Path, spelled as in faults -> line in the file, from 1.


def documents(text: str, source: str) -> tuple[Document, ...]:
    """All documents of a text; empty ones are left out.

    Raises: UnreadableSpec: not YAML, or YAML that kubectl would read differently. Names ``source`` and line.
    """
    read = [_ParseState(source).document(node) for node in _nodes(text, source)]
    return tuple(document for document in read if document.value is not None)


def _nodes(text: str, source: str) -> list[yaml.Node]:
    """The nodes that PyYAML makes of each document."""
    try:
        composer = _Composer(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character U+{error.character:04X} is not allowed in YAML"
        raise UnreadableSpec(f"{source}, line {line}: {message}") from error
    nodes: list[yaml.Node] = []
    try:
        while composer.check_node():
            node = composer.get_node()
            if node is not None:
                nodes.append(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise UnreadableSpec(f"{source}, line {line}: {error.problem or error.context}") from error
    except (ValueError, OverflowError) as error:  # PyYAML converts escapes and versions without a check
        message = "an escape is beyond U+10FFFF, or the version of YAML is not a number"
        raise UnreadableSpec(f"{source}, line {composer.line + 1}: {message}") from error
    return nodes


def scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain scalar, as Go reads it.

    Raises: ValueError: infinity, not-a-number, an integer beyond 64 bits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _NO_JSON.fullmatch(text):
        raise ValueError(f"{text} cannot be represented in JSON")
    if text[0] not in "+-.0123456789" or (text[0] == "." and not _POINT_FIRST.fullmatch(text)):
        return text
    plain = text.replace("_", "")
    integer = _INTEGER.fullmatch(plain)
    if integer is not None:
        return _integer(integer)
    if _FLOAT.fullmatch(plain):
        number = float(plain)
        return number if math.isfinite(number) else text
    return text


def _integer(found: re.Match[str]) -> int:
    sign, *digits = found.groups()
    if len(found[0].lstrip("+-0")) > MAX_DIGITS:  # Python refuses to convert thousands of them
        raise ValueError(f"{found[0][:MAX_DIGITS]}… is beyond 64 bits; put it in quotes to make it a string")
    magnitude = next(int(text, base) for text, base in zip(digits, (16, 2, 8, 10), strict=True) if text)
    value = -magnitude if sign == "-" else magnitude
    if not -INT_BOUND <= value < INT_BOUND:
        raise ValueError(f"{found[0]} is beyond 64 bits; put it in quotes to make it a string")
    return value


class _Composer(yaml.BaseLoader):
    """PyYAML's composer without its resolution of scalars: a plain one gets the tag ``?``."""

    levels = 0  #: The depth of the node being composed.

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.levels += 1
        if self.levels > MAX_LEVELS:
            message = f"values are nested deeper than {MAX_LEVELS} levels"
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, message, mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return "?" if implicit[0] else f"{_TAG}str"
        return f"{_TAG}map" if kind is yaml.MappingNode else f"{_TAG}seq"


class _ParseState:
    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, int] = {}
        self.count = 0
        self.path_chars = 0

    def document(self, node: yaml.Node) -> Document:
        return Document(value=self.value(node, "", ()), lines=self.lines)

    def fail(self, node: yaml.Node, message: str) -> UnreadableSpec:
        return UnreadableSpec(f"{self.source}, line {node.start_mark.line + 1}: {message}")

    def value(self, node: yaml.Node, path: str, inside: tuple[int, ...]) -> Any:
        self.counted(node, path)
        if id(node) in inside:
            raise self.fail(node, "an alias contains itself")
        if len(inside) >= MAX_LEVELS:  # aliases nest what is not nested in the text
            raise self.fail(node, f"values are nested deeper than {MAX_LEVELS} levels")
        self.lines.setdefault(path, node.start_mark.line + 1)
        match node:
            case yaml.ScalarNode():
                return self.scalar(node)
            case yaml.SequenceNode():
                self.tagged(node, "seq")
                return [
                    self.value(item, f"{path}[{index}]", (*inside, id(node))) for index, item in enumerate(node.value)
                ]
            case yaml.MappingNode():
                self.tagged(node, "map")
                return self.mapping(node, path, (*inside, id(node)))
        raise self.fail(node, f"{node.tag} is not supported in a spec")

    def counted(self, node: yaml.Node, path: str) -> None:
        """Called before one more value, or one more map that is merged, is read; fails beyond the bounds."""
        self.count += 1
        self.path_chars += len(path)
        if self.count > MAX_VALUES:
            raise self.fail(node, f"aliases expand the document beyond {MAX_VALUES} values")
        if self.path_chars > MAX_PATHS:
            raise self.fail(node, f"the paths of all values have more than {MAX_PATHS} characters; use shorter keys")

    def tagged(self, node: yaml.Node, kind: str) -> None:
        if node.tag != f"{_TAG}{kind}":
            raise self.fail(node, f"the tag {node.tag} is not supported; write the value without it")

    def scalar(self, node: yaml.ScalarNode) -> Any:
        if has_surrogate(node.value):
            raise self.fail(node, f"{node.value[:40]!a} contains half of a surrogate pair, which is not valid text")
        if node.tag != "?":
            self.tagged(node, "str")
            return node.value
        try:
            return scalar(node.value)
        except ValueError as error:
            raise self.fail(node, str(error)) from error

    def mapping(self, node: yaml.MappingNode, path: str, inside: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag == "?" and key_node.value == "<<":
                for mapping in self.merges(value_node, path, inside):
                    for key, value in mapping.items():  # not `mapping | merged`, which copies all that is merged
                        merged.setdefault(key, value)
                continue
            key = self.key(key_node)
            place = join(path, key)
            if key in found:
                raise self.fail(key_node, f"{place} is written twice")
            self.lines[place] = key_node.start_mark.line + 1
            found[key] = self.value(value_node, place, inside)
        return merged | found

    def merges(self, node: yaml.Node, path: str, inside: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """The maps that ``<<`` names: one map or a list of them; the first that has a key wins."""
        sources: Sequence[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode) or id(source) in inside:
                raise self.fail(source, "<< takes a map, or a list of maps")
            self.counted(source, path)
            if len(inside) >= MAX_LEVELS:
                raise self.fail(source, f"values are nested deeper than {MAX_LEVELS} levels")
            yield self.mapping(source, path, (*inside, id(source)))

    def key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(node, "a key must be a scalar")
        value = self.scalar(node)
        match value:
            case None:
                raise self.fail(node, "a key must not be null; put it in quotes")
            case bool():
                return "true" if value else "false"
            case float():
                if value.is_integer() and abs(value) < 1 << 24:
                    return str(int(value))
                raise self.fail(node, f"the key {node.value} is a number with a fraction; put it in quotes")
        return str(value)
