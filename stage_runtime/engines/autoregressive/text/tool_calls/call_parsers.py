"""Calls of tools in an answer's text as it comes: which characters are for the client, and which are calls. Pure.

`call_forms` says which parser a model needs. Thinking that `reasoning` leaves in the text
(``<think>…</think>``) is text, whatever stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, Protocol

import msgspec

from stage_runtime.engines.autoregressive.text.detokenizer import overlap
from stage_runtime.engines.autoregressive.text.reasoning import THINK, THOUGHT
from stage_runtime.engines.autoregressive.text.tool_calls.calls import Call, calls_in, named_call

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
MARK: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"  # between a name and its arguments; a special token, so mostly no text
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_NAMED: Final = re.compile(r"\s*([\w.-]{1,64})(?:\[ARGS\])?\s*")
_OPENING, _CLOSING = frozenset("{["), frozenset("}]")
_BLANK: Final = " \t\r\n"
_BETWEEN: Final = f"{_BLANK};,"  # what models write between calls
_FIRST_KEY: Final = re.compile(
    r'\s*\[?\s*\{?\s*(?:"((?:[^"\\]|\\.)*)("?)(?:\s*:\s*(?:"((?:[^"\\]|\\.)*)("?))?)?)?', re.DOTALL
)
_KEYS: Final = ("name", "arguments", "parameters", "type", "id")  # with which models begin a call


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The request's wishes for the calls in its answers.

    names: of the tools. forced: the answer is calls and nothing else. most: how many calls end the answer; 0: no bound.
    structured: beside calls only an answer of the client's schema is allowed, so calls stand at the beginning alone.
    is_answer: whether a text is an answer of that schema, where such a one could be taken for a call. thinking: the
    prompt has begun the model's thinking.
    """

    names: frozenset[str] = frozenset()
    forced: bool = False
    most: int = 0
    structured: bool = False
    is_answer: Callable[[str], bool] | None = None
    thinking: bool = False


class Found(NamedTuple):
    """spans: of characters for the client, as places in the whole text. calls: that are whole now."""

    spans: list[tuple[int, int]]
    calls: list[Call]


class Parser(Protocol):
    """Takes calls out of a text as it comes."""

    @property
    def full(self) -> bool:
        """It has as many calls as were asked for: the answer ends here."""

    def feed(self, text: str) -> Found: ...

    def flush(self, *, cut: bool) -> Found:
        """Text and calls held until the answer's end. cut: a bound of tokens ended it, so text that may begin a call
        counts as the beginning of one.
        """


class _Parser:
    """Text that is not decided upon is held."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._held = ""
        self._at = 0  #: The place in the whole text where it begins.
        self._calls = 0
        self._thinking = asked.thinking
        self._plain = False  #: The rest is text.
        self._found = Found([], [])

    @property
    def full(self) -> bool:
        return 0 < self._asked.most <= self._calls

    def feed(self, text: str) -> Found:
        self._held += text
        self._run()
        return self._taken()

    def flush(self, *, cut: bool) -> Found:
        self._run()
        while self._held and not self.full:
            self._end(cut=cut or self._asked.forced)
        return self._taken()

    def _run(self) -> None:
        while self._held and not self.full and (self._think() if self._thinking else self._step()):
            pass

    def _taken(self) -> Found:
        found, self._found = self._found, Found([], [])
        return found

    def _step(self) -> bool:
        """Decide upon what is held, or a part of it. False: more must come."""
        raise NotImplementedError

    def _end(self, *, cut: bool) -> None:
        """Decide upon what is held, or a part of it: no more will come."""
        raise NotImplementedError

    def _think(self) -> bool:
        if self._scan(THOUGHT) is None:
            return False
        self._show(len(THOUGHT))
        self._thinking = False
        return True

    def _scan(self, *tags: str) -> str | None:
        """Show what is held up to the first of these tags, and return it; None: none has come so far."""
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._show(at)
            return tag
        self._show(len(self._held) - max((overlap(self._held, tag) for tag in tags), default=0))
        return None

    def _show(self, count: int) -> None:
        if count:
            self._found.spans.append((self._at, self._at + count))
            self._skip(count)

    def _skip(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count

    def _add(self, calls: list[Call]) -> None:
        room = self._asked.most - self._calls if self._asked.most else len(calls)
        self._found.calls.extend(calls[:room])
        self._calls += len(calls[:room])


class CallParser(_Parser):
    """``<tool_call>``, JSON of a call or of a list of calls, ``</tool_call>``. JSON of anything else is text."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._inside = False  #: The held text begins with the mark of a call's beginning.
        self._read = 0  #: Characters of it in which no call ends.
        self._follows = False  #: It follows a call.

    def _step(self) -> bool:
        if self._plain:
            return self._scan() is not None
        if not self._inside:
            return self._outside()
        end = self._held.find(END, self._read)
        if end < 0:
            self._read = max(self._read, len(self._held) - len(END) + 1)
            return False
        body = self._held[len(BEGIN) : end]
        made = calls_in(body)
        if not made and _ends_in_string(body):  # an end tag inside a string ends no call
            self._read = end + len(END)
            return True
        self._leave(made, end + len(END))
        return True

    def _outside(self) -> bool:
        rest = self._held.lstrip()
        first = self._asked.structured and not self._calls
        if (self._follows or first) and BEGIN.startswith(rest[: len(BEGIN)]):
            if len(rest) < len(BEGIN):
                return False  # blanks after a call are text only before other text
            blank = len(self._held) - len(rest)
            self._skip(blank) if self._follows else self._show(blank)
        elif first and not THINK.startswith(rest[: len(THINK)]):
            self._plain = True
            return True
        tag = self._scan(BEGIN, THINK)
        self._follows = False
        if tag == BEGIN:
            self._inside, self._read = True, len(BEGIN)
        elif tag == THINK:
            self._show(len(THINK))
            self._thinking = True
        return tag is not None

    def _leave(self, made: list[Call], count: int) -> None:
        self._inside = False
        if made:
            self._follows = True
            self._add(made)
            self._skip(count)
        else:
            self._show(count)

    def _end(self, *, cut: bool) -> None:
        if not self._inside:
            rest = self._held.strip()
            partial = cut and not self._thinking and bool(rest) and BEGIN.startswith(rest)
            blank = self._follows and not rest
            self._skip(len(self._held)) if blank or partial else self._show(len(self._held))
            return
        body = self._held[len(BEGIN) :]
        made = calls_in(body[: len(body) - overlap(body, END)])
        if made or cut:
            self._add(made)
            self._skip(len(self._held))
            return
        body, end, _rest = body.partition(END)  # it was not a string, or it has no end
        self._inside = False
        self._show(len(BEGIN) + len(body) + len(end))
        self._run()


def _ends_in_string(body: str) -> bool:
    """Whether this may be the beginning of JSON that goes on inside a string."""
    if not body.lstrip().startswith(("{", "[")):
        return False
    return _ESCAPED.sub("", body).count('"') % 2 == 1


class JSONCallParser(_Parser):
    """Calls that are JSON where an answer begins, after ``mark``, and after another call.

    JSON that is not a call of a known tool is text, as is what follows it.
    """

    def __init__(self, asked: Asked, *, opening: str, mark: str = "", unmarked: bool = True) -> None:
        """opening: how a call may begin. unmarked: it may begin without the mark."""
        super().__init__(asked)
        self._opening = opening
        self._mark = mark
        self._unmarked = unmarked
        self._text = False  #: Everything until the next mark is text.
        self._marked = (
            0  #: Characters of a mark with which the held text begins, and before it; 0: it begins with none.
        )
        self._called = False  #: It follows a call.
        self._reset()

    def _reset(self) -> None:
        self._marked = 0
        self._read = 0  #: Characters of what is held that were read: a value begins there, and its depth at that place.
        self._depth = 0
        self._quoted = self._escaped = False

    def _step(self) -> bool:
        if self._text:
            return self._after_text()
        begin = self._begin()
        if begin is None:
            return self._thinking
        if begin < 0 or (self._asked.structured and not self._marked and not self._may_be_call()):
            self._give_up()
            return True
        end = self._close(begin)
        if end is None:
            return False
        calls = self._calls_of(begin, end)
        if not calls or self._is_answer(begin, end):
            self._give_up()
            return True
        self._add(calls)
        self._skip(end)
        self._called = True
        self._reset()
        return True

    def _after_text(self) -> bool:
        tag = self._scan(*([self._mark] if self._mark else []), THINK)
        if tag == THINK:
            self._show(len(THINK))
            self._thinking = True
        elif tag is not None:
            self._text = self._called = False
            self._reset()
            self._marked = len(tag)
        return tag is not None

    def _give_up(self) -> None:
        """The held text is not a call; it is given out up to the next mark."""
        self._show(self._marked)
        self._reset()
        self._text = True

    def _begin(self) -> int | None:
        """The place where a value begins in the held text. None: it may come. A value below 0: the text does not begin
        a call.
        """
        blank = _BETWEEN if self._called else _BLANK
        rest = self._held[self._marked :].lstrip(blank)
        at = len(self._held) - len(rest)
        if not rest:
            return None
        if not self._marked:
            for tag in filter(None, (self._mark, THINK)):
                if tag.startswith(rest):
                    if rest == tag:
                        self._take(tag, at)
                    return None if rest != tag or tag == THINK else self._begin()
                if rest.startswith(tag):
                    self._take(tag, at)
                    return None if tag == THINK else self._begin()
        if rest[0] in self._opening and (self._marked or self._unmarked):
            return at
        return self._named_begin() if self._marked else -1

    def _take(self, tag: str, at: int) -> None:
        """The held text begins with this tag, after blanks."""
        if tag == THINK:
            self._show(at + len(tag))
            self._thinking = True
        else:
            self._skip(at)
            self._marked, self._called = len(tag), False

    def _named_begin(self) -> int | None:
        """The same as `_begin`, for a call whose name stands before its arguments."""
        named = _NAMED.match(self._held, self._marked)
        place = self._held.find("{", self._marked)
        if place >= 0:
            return place if named is not None and named.end() == place else -1
        whole = named is not None and ARGUMENTS.startswith(self._held[named.end() :])
        return None if whole else -1

    def _close(self, begin: int) -> int | None:
        """The place where the value that begins there ends. None: it goes on."""
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

    def _calls_of(self, begin: int, end: int) -> list[Call]:
        value = self._held[begin:end]
        name = _NAMED.fullmatch(self._held[self._marked : begin].lstrip(_BETWEEN)) if self._marked else None
        calls = calls_in(value) if name is None else named_call(name[1], value)
        return calls if all(call.name in self._asked.names for call in calls) else []

    def _is_answer(self, begin: int, end: int) -> bool:
        is_answer = self._asked.is_answer
        return is_answer is not None and not self._marked and not self._calls and is_answer(self._held[begin:end])

    def _may_be_call(self) -> bool:
        """Whether the held text, which is not a whole value yet, may become a call."""
        rest = self._held.lstrip(_BETWEEN if self._called else _BLANK)
        if self._marked or not rest or (self._mark and self._mark.startswith(rest)):
            return True
        if rest[0] not in self._opening or not self._unmarked:
            return False
        found = _FIRST_KEY.match(rest)
        assert found is not None
        key, closed, name, named = found.groups()
        if not closed:
            return found.end() == len(rest) and _begins(key or "", _KEYS)
        if key != "name" or name is None:
            return key in _KEYS
        return name in self._asked.names if named else _begins(name, self._asked.names)

    def _end(self, *, cut: bool) -> None:
        whole = len(self._held)
        if self._text or self._thinking:
            partial = cut and not self._thinking and self._mark and self._mark.startswith(self._held)
            self._skip(whole) if partial else self._show(whole)
        elif (self._called and not self._held.strip(_BETWEEN)) or (cut and self._is_cut_call()):
            self._skip(whole)
        elif self._mark and not self._marked:  # a value without an end is text, and a call may begin inside
            self._give_up()
            self._run()
        else:
            self._show(whole)

    def _is_cut_call(self) -> bool:
        return self._asked.forced or (bool(self._held.strip()) and self._may_be_call())


def _begins(text: str, whole: Collection[str]) -> bool:
    return any(one.startswith(text) for one in whole)
