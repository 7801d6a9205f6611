"""Text in which one sees which characters came from a client, whatever a chat template does with it. Pure.

A client's characters stand in the buffer of a `Marked` as private-use characters, so no operation, not even one that is
written in C and loses the class, can make a control string of them. Operations that look at the text (comparing,
searching, cutting) is told its true characters. Made by `rendering`, encoded by `controls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any, Final, SupportsIndex

from stage_runtime.errors import InvalidRequest

_PRIVATE: Final = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # planes 15 and 16


class _Assigned(dict[int, int]):
    """Code point -> its substitute, which is chosen when the code point is first met."""

    def __init__(self, free: Iterator[int], back: dict[int, int]) -> None:
        self._free = free
        self._back = back

    def __missing__(self, point: int) -> int:
        chosen = next(self._free, None)
        if chosen is None:
            raise InvalidRequest(f"messages have more than {len(self)} different characters", param="messages")
        self[point] = chosen
        self._back[chosen] = point
        return chosen


class Alphabet:
    """The substitutes of one rendering. reserved: text of the template itself, whose characters are not substitutes."""

    def __init__(self, reserved: str = "") -> None:
        taken = set(map(ord, reserved))
        self._back: dict[int, int] = {}
        self._forth = _Assigned((point for point in chain(*_PRIVATE) if point not in taken), self._back)

    def mark(self, text: str) -> Marked:
        """A client's text."""
        plain = buffer(text)
        return Marked(plain.translate(self._forth), plain, self)

    def true(self, text: str) -> str:
        return buffer(text) if str.isascii(text) else str.translate(text, self._back)

    def is_marked(self, text: str) -> bool:
        """Whether any of its characters came from the client."""
        return not str.isascii(text) and any(ord(letter) in self._back for letter in str.__iter__(text))

    def runs(self, text: Marked) -> Iterator[tuple[bool, str]]:
        """Its parts, whether they came from the client, and their true characters."""
        letters = zip(map(ord, str.__iter__(text)), text._true, strict=True)
        for marked, run in groupby(letters, key=lambda pair: pair[0] in self._back):
            yield marked, "".join(letter for _point, letter in run)


class Marked(str):
    """A text of which a part came from a client, or none: a literal of a template, which has no alphabet."""

    __slots__ = ("_alphabet", "_true")
    _true: str  #: True characters, as many as the buffer has.
    _alphabet: Alphabet | None

    def __new__(cls, buffer: str = "", true: str | None = None, alphabet: Alphabet | None = None) -> Marked:
        made = super().__new__(cls, buffer)
        made._true = str.join("", (buffer,)) if true is None else true
        made._alphabet = alphabet
        return made

    # --- what looks at the text -----------------------------------------------------------------------------------

    def __hash__(self) -> int:
        return hash(self._true)

    def __eq__(self, other: object) -> bool:
        return bool(self._true == self._plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._true != self._plain(other))

    def __lt__(self, other: str) -> bool:
        return bool(self._true < self._plain(other))

    def __le__(self, other: str) -> bool:
        return bool(self._true <= self._plain(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._true > self._plain(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._true >= self._plain(other))

    def __contains__(self, other: object) -> bool:
        return self._plain(other) in self._true

    def __int__(self) -> int:
        return int(self._true)

    def __float__(self) -> float:
        return float(self._true)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._as_marked(repr(self._true))

    # --- parts of it ----------------------------------------------------------------------------------------------

    def __getitem__(self, place: SupportsIndex | slice) -> Marked:
        return Marked(str.__getitem__(self, place), self._true[place], self._alphabet)

    def __iter__(self) -> Iterator[str]:
        for buffer, true in zip(str.__iter__(self), self._true, strict=True):
            yield Marked(buffer, true, self._alphabet)

    def strip(self, chars: str | None = None) -> Marked:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Marked:
        return self[len(self) - len(self._true.lstrip(self._plain(chars))) :]

    def rstrip(self, chars: str | None = None) -> Marked:
        return self[: len(self._true.rstrip(self._plain(chars)))]

    def removeprefix(self, prefix: str) -> Marked:
        return self[len(self) - len(self._true.removeprefix(self._plain(prefix))) :]

    def removesuffix(self, suffix: str) -> Marked:
        return self[: len(self._true.removesuffix(self._plain(suffix)))]

    def partition(self, sep: str) -> tuple[Marked, Marked, Marked]:
        return self._cut_in_three(*self._true.partition(self._plain(sep)))

    def rpartition(self, sep: str) -> tuple[Marked, Marked, Marked]:
        return self._cut_in_three(*self._true.rpartition(self._plain(sep)))

    def _cut_in_three(self, head: str, sep: str, _tail: str) -> tuple[Marked, Marked, Marked]:
        begin, end = len(head), len(head) + len(sep)
        return self[:begin], self[begin:end], self[end:]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self._true.split(self._plain(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self._true.rsplit(self._plain(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole, at, found = self._true.splitlines(keepends=True), 0, list[str]()
        for line, kept in zip(self._true.splitlines(keepends), whole, strict=True):
            found.append(self[at : at + len(line)])
            at += len(kept)
        return found

    def _located(self, pieces: list[str], sep: str | None) -> list[str]:
        """The parts of this text that ``split`` has found."""
        at, found = 0, list[str]()
        for piece in pieces:
            if sep is None:
                at = self._true.index(piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return found

    # --- texts made of it -----------------------------------------------------------------------------------------

    def __add__(self, other: str) -> Marked:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Marked:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Marked:
        return Marked(str.__mul__(self, count), self._true * count, self._alphabet)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return joined((str.__mod__(self, values),), alphabet_in((self, values)))

    def __rmod__(self, form: str) -> str:
        return joined((str.__mod__(form, self),), self._alphabet)

    def __format__(self, spec: str) -> str:
        return self if not spec else self._as_marked(format(self._true, self._plain(spec)))

    def join(self, parts: Iterable[str]) -> Marked:
        found = list(parts)
        str.join("", found)  # raises what a join of these raises
        between: list[str] = [self] * (2 * len(found) - 1 if found else 0)
        between[::2] = found
        return joined(between)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Marked:
        if not old:
            return self._as_marked(self._true.replace("", self._plain(new), count))
        pieces = self._located(self._true.split(self._plain(old), count), old)
        return Marked.join(new if isinstance(new, Marked) else Marked(new, self._plain(new)), pieces)

    def _mapped(self, change: Callable[[str], str]) -> Marked:
        """Letter by letter, as ``upper`` does."""
        changed, alphabet = change(self._true), self._alphabet
        if alphabet is None:
            return Marked(changed)
        if len(changed) != len(self):
            return self._as_marked(changed)
        letters = zip(str.__iter__(self), changed, str.__iter__(alphabet.mark(changed)), strict=True)
        buffer = "".join(marked if alphabet.is_marked(was) else plain for was, plain, marked in letters)
        return Marked(buffer, changed, alphabet)

    def _as_marked(self, text: str) -> Marked:
        """All of a text that was made of this one, as the client's."""
        return Marked(text) if self._alphabet is None else self._alphabet.mark(text)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Marked):
            return value._true
        if isinstance(value, tuple):
            return tuple(map(self._plain, value))
        return self._alphabet.true(value) if isinstance(value, str) and self._alphabet is not None else value


def buffer(text: str) -> str:
    """A text with its substitutes, as a plain str."""
    return str.join("", (text,))


def true(value: Any) -> Any:
    """The characters of a marked text; any other value as it is."""
    return value._true if isinstance(value, Marked) else value


def joined(parts: Iterable[str], alphabet: Alphabet | None = None) -> Marked:
    """One text of several. alphabet: of parts that have lost their class."""
    found = list(parts)
    known = alphabet or alphabet_in(found)
    text = "".join(
        part if known is None else part._true if isinstance(part, Marked) and part._alphabet else known.true(part)
        for part in found
    )
    return Marked(str.join("", found), text, known)


def alphabet_in(values: Any) -> Alphabet | None:
    """That of any text in a value."""
    if isinstance(values, Marked):
        return values._alphabet
    inner = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple | list) else ()
    return next((found for one in inner if (found := alphabet_in(one)) is not None), None)


def _looks(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def look(self: Marked, *values: Any) -> Any:
        return plain(self._true, *map(self._plain, values))

    return look


def _changes(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def change(self: Marked) -> Marked:
        return self._mapped(plain)

    return change


def _makes(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def make(self: Marked, *values: Any, **named: Any) -> Marked:
        return self._as_marked(plain(self._true, *map(self._plain, values), **named))

    return make


for _name in ("startswith", "endswith", "find", "rfind", "index", "rindex", "count"):
    setattr(Marked, _name, _looks(_name))
for _name in (name for name in dir(str) if name.startswith("is")):
    setattr(Marked, _name, _looks(_name))
for _name in ("upper", "lower", "casefold", "capitalize", "title", "swapcase"):
    setattr(Marked, _name, _changes(_name))
for _name in ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"):
    setattr(Marked, _name, _makes(_name))
