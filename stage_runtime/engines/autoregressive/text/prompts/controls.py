"""Prompts to tokens, in which a client's text never becomes a control token: not by itself, nor with what is beside it.

An innocent prompt has the tokens that the tokenizer gives it. The prompt is encoded once more where a control string
is, or is a part of, a client's text, by a copy of the tokenizer that knows its control tokens by other names
(`renamed`); these stand where the template has written one.
"""

from __future__ import annotations

import functools
import logging
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stage_runtime.engines.autoregressive.text.prompts import marked
from stage_runtime.engines.autoregressive.text.prompts.marked import Alphabet
from stage_runtime.engines.autoregressive.text.prompts.renamed import Renamed
from stage_runtime.engines.autoregressive.text.prompts.template_messages import TemplateForm
from stage_runtime.engines.autoregressive.text.tool_calls import verbatim
from stage_runtime.engines.autoregressive.text.tool_calls.verbatim import WrittenChat
from stage_runtime.errors import InvalidRequest

log = logging.getLogger(__name__)

_MOST_TEMPLATES: Final = 16  # authors may give one with a prompt
_BYTE: Final = re.compile("<0x[0-9A-Fa-f]{2}>")  # sentencepiece's name of a token that is one byte
_SUBSTITUTES: Final = re.compile("[\U000f0000-\U0010fffd]{2,}")  # of `marked`
_UNKNOWN: Final = "\U0003134a \U000ffffd"  # characters that no vocabulary has
_NOT_AS_TEXT: Final = "a text has a control string that the model's tokenizer cannot take as text"
_MARKUP: Final = re.compile(r"[<>\[\]{}|\uff5c«»【】]")
_TAG: Final = re.compile(r"<[^\s].*>|\[[^\s].*\]|[|\uff5c«【].+[|\uff5c»】]", re.DOTALL)
#: Tags that models have as tokens because texts have them, as Gemma's do.
_HTML: Final = re.compile(
    r"</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td|tfoot|"
    r"th|thead|tr|u|ul)>"
)
#: Arguments of transformers' ``apply_chat_template`` that it hands to the tokenizer.
_OF_TOKENIZER: Final = ("padding", "truncation", "max_length")


def is_control(token: Any, template: str, named: Sequence[str] = ()) -> bool:
    """Whether an added token controls a chat: a special one; one that is a tag, such as ``<tool_call>`` or ``<think>``,
    unless HTML has it; one with a bracket in it that the template writes or looks for. Others (line breaks, runs of
    blanks, words) are ways to write ordinary text.

    named: of special tokens and of the tokenizer's ``chat_control_tokens``, as of transformers.
    """
    content = str(token.content)
    if token.special or content in named:
        return not _BYTE.fullmatch(content)
    if content in template and _MARKUP.search(content):
        return True
    return bool(_TAG.fullmatch(content)) and not _HTML.fullmatch(content) and not _BYTE.fullmatch(content)


class TextEncoder:
    """Encodes chats and texts by one tokenizer. Not for two threads at once."""

    def __init__(self, tokenizer: Any, *, control_strings: bool = False) -> None:
        """control_strings: those in a client's text become control tokens."""
        self._tokenizer = tokenizer
        self._known: dict[str, _ControlTokens] = {}  #: Values by the source of a chat template.
        self._forms: dict[str, TemplateForm] = {}  #: Values by the source of a chat template.
        self._apart = not control_strings and hasattr(tokenizer, "backend_tokenizer")
        if not self._apart and not control_strings and hasattr(tokenizer, "encode"):  # else it takes no text
            log.warning(
                "%s is not a fast tokenizer: control strings in texts of clients count", type(tokenizer).__name__
            )

    @property
    def template(self) -> Any:
        """The tokenizer's chat template: a text, or several by name. None: it has none."""
        return getattr(self._tokenizer, "chat_template", None)

    def chat(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        """arguments: of ``apply_chat_template``. Raises: what the template raises; InvalidRequest."""
        names = dict(arguments)
        settings: dict[str, Any] = {name: names.pop(name) for name in _OF_TOKENIZER if name in names}
        settings |= names.pop("tokenizer_kwargs", None) or {}
        chat = verbatim.written(
            messages, functools.partial(self._tokenizer.apply_chat_template, tokenize=False, **names)
        )
        if self._apart:
            source = self._tokenizer.get_chat_template(names.pop("chat_template", None), names.get("tools"))
            return self._controls(source).encode_chat(chat, names, settings)
        return [int(token) for token in self._tokenizer(chat.text, add_special_tokens=False, **settings)["input_ids"]]

    def form(self, arguments: Mapping[str, Any]) -> TemplateForm:
        """The form of ``arguments`` that the chat template takes. Raises: as `chat`."""
        source = self._tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
        if source not in self._forms:
            if len(self._forms) == _MOST_TEMPLATES:
                self._forms.clear()
            write = functools.partial(self._tokenizer.apply_chat_template, chat_template=source, tokenize=False)
            self._forms[source] = TemplateForm(functools.partial(write, add_generation_prompt=True))
        return self._forms[source]

    def text(self, text: str, *, literal: bool) -> list[int]:
        """literal: its control strings are ordinary text. Raises: InvalidRequest."""
        if literal and self._apart:
            return self._controls(str(self.template or "")).encode_text(text)
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def around(self, *texts: str) -> dict[str, list[int]]:
        """One text or a pair of them, of a client, as the tokenizer encodes them for a model that reads no chats.

        Returns: ``input_ids``, and ``token_type_ids`` where the tokenizer makes them. Raises: InvalidRequest.
        """
        made = self._tokenizer(*texts, verbose=False)
        found = {key: list(made[key]) for key in ("input_ids", "token_type_ids") if key in made}
        return self._controls("").encode_around(texts, found) if self._apart else found

    def _controls(self, template: str) -> _ControlTokens:
        if template not in self._known:
            if len(self._known) == _MOST_TEMPLATES:
                self._known.clear()
            self._known[template] = _ControlTokens(self._tokenizer, template)
        return self._known[template]


def _shortened(shown: str) -> tuple[str, list[int], list[int]]:
    """A text with one substitute for each run of them: they take longer to encode than other characters.

    Returns: it; places in it; how far behind each of them, up to the next one, its characters were before.
    """
    pieces, places, shifts, at, size = list[str](), [0], [0], 0, 0
    for run in _SUBSTITUTES.finditer(shown):
        pieces.append(shown[at : run.start() + 1])
        size += len(pieces[-1])
        at = run.end()
        places.append(size)
        shifts.append(at - size)
    return "".join([*pieces, shown[at:]]), places, shifts


class _Found(NamedTuple):
    """A control token, and where its characters are in a text."""

    id: int
    begin: int
    end: int


class _Frame(NamedTuple):
    """The texts that a tokenizer writes around and between texts: one piece more than there are texts. of_texts: their
    types.
    """

    ids: list[list[int]]
    types: list[list[int]]
    of_texts: list[int]


class _ControlTokens:
    """Those of a tokenizer and a chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._template = template
        self._added: dict[int, Any] = dict(sorted(tokenizer.added_tokens_decoder.items()))
        named = [*tokenizer.all_special_tokens, *(getattr(tokenizer, "chat_control_tokens", None) or ())]
        self._ids = frozenset(number for number, token in self._added.items() if is_control(token, template, named))
        self._frames: dict[int, _Frame] = {}  #: Frames by the number of texts.
        #: Tokens for characters outside the vocabulary control nothing.
        self._filling = frozenset(self._backend.encode(_UNKNOWN, add_special_tokens=False).ids)

    def encode_chat(self, chat: WrittenChat, names: Mapping[str, Any], settings: Mapping[str, Any]) -> list[int]:
        """names: what the template is given beside the messages. settings: of the tokenizer."""
        from stage_runtime.engines.autoregressive.text.prompts import rendering

        text = chat.text
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **settings)
        ids = [int(token) for token in encoded["input_ids"]]
        shown, alphabet = rendering.render(self._template, chat.messages, names, self._tokenizer.special_tokens_map)
        shown = chat.filled(shown, lambda given: marked.buffer(alphabet.mark(given)))
        found = self._found(ids, encoded["offset_mapping"], text)
        if alphabet.true(shown) == text:
            forged = any(alphabet.is_marked(shown[one.begin : one.end]) for one in found)
        else:  # the template has done something with a text that `marked` does not follow
            forged = [one.id for one in found] != [one.id for one in self._own(shown)]
        return self._encode_apart(shown, alphabet) if forged else ids

    def encode_text(self, text: str) -> list[int]:
        plain = self._backend.encode(text, add_special_tokens=False)
        if next(self._found(plain.ids, plain.offsets, text), None) is None:
            return [int(token) for token in self._tokenizer(text)["input_ids"]]
        before, after = self._around
        return [*before, *self._checked(self._renamed.encode(text), ()), *after]

    def encode_around(self, texts: Sequence[str], encoded: dict[str, list[int]]) -> dict[str, list[int]]:
        """encoded: the texts, as the tokenizer does it. Returns: it, or without the control tokens of a text."""
        if len(texts) not in self._frames:
            self._frames[len(texts)] = self._frame(len(texts))
        frame = self._frames[len(texts)]
        controls = self._ids - self._filling
        own = [token for piece in frame.ids for token in piece if token in controls]
        if [token for token in encoded["input_ids"] if token in controls] == own:
            return encoded
        made: dict[str, list[int]] = {"input_ids": list(frame.ids[0]), "token_type_ids": list(frame.types[0])}
        for text, of_text, ids, types in zip(texts, frame.of_texts, frame.ids[1:], frame.types[1:], strict=True):
            inner = self._renamed.encode(text)
            made["input_ids"] += [*inner, *ids]
            made["token_type_ids"] += [*[of_text] * len(inner), *types]
        self._checked(made["input_ids"], own)
        return {key: made[key] for key in encoded}

    def _frame(self, count: int) -> _Frame:
        """Found by texts of one letter. Raises: InvalidRequest: these are not found again."""
        whole = self._tokenizer(*"ab"[:count])
        ids = list(whole["input_ids"])
        types = list(whole["token_type_ids"]) if "token_type_ids" in whole else [0] * len(ids)
        frame, at = _Frame([], [], []), 0
        for letter in "ab"[:count]:
            inner = self._backend.encode(letter, add_special_tokens=False).ids
            begin = next((place for place in range(at, len(ids)) if ids[place : place + len(inner)] == inner), None)
            if begin is None:
                raise InvalidRequest(_NOT_AS_TEXT)
            frame.ids.append(ids[at:begin])
            frame.types.append(types[at:begin])
            frame.of_texts.append(types[begin])
            at = begin + len(inner)
        frame.ids.append(ids[at:])
        frame.types.append(types[at:])
        return frame

    def _found(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str) -> Iterator[_Found]:
        """The control tokens of an encoded text."""
        for token, (begin, end) in zip(ids, offsets, strict=True):
            if token not in self._ids:
                continue
            span = text[begin:end]  # with the blanks beside it, of a token that takes them in
            if token not in self._filling or span.strip() == self._added[token].content:
                yield _Found(token, end - len(span.lstrip()), begin + len(span.rstrip()))

    def _own(self, shown: str) -> Iterator[_Found]:
        """The control tokens that the template has written. A client's text is no longer looked at than need be."""
        short, places, shifts = _shortened(shown)
        encoded = self._backend.encode(short, add_special_tokens=False)
        for one in self._found(encoded.ids, encoded.offsets, short):
            shift = shifts[bisect(places, one.begin) - 1]
            yield _Found(one.id, one.begin + shift, one.end + shift)

    def _encode_apart(self, shown: str, alphabet: Alphabet) -> list[int]:
        pieces, at, own = list[str](), 0, list(self._own(shown))
        for one in own:
            pieces += [alphabet.true(shown[at : one.begin]), self._renamed.names[one.id]]
            at = one.end
        ids = self._renamed.encode("".join([*pieces, alphabet.true(shown[at:])]))
        return self._checked(ids, [one.id for one in own])

    def _checked(self, ids: list[int], own: Sequence[int]) -> list[int]:
        """Raises: InvalidRequest: there are other control tokens in it than the template's own."""
        controls = self._ids - self._filling
        if [token for token in ids if token in controls] != [token for token in own if token in controls]:
            raise InvalidRequest(_NOT_AS_TEXT)
        return ids

    @functools.cached_property
    def _renamed(self) -> Renamed:
        return Renamed(self._backend, self._added, self._ids)

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after every text."""
        inner = self._backend.encode("a", add_special_tokens=False).ids
        whole = [int(token) for token in self._tokenizer("a")["input_ids"]]
        at = next((at for at in range(len(whole)) if whole[at : at + len(inner)] == inner), len(whole))
        return whole[:at], whole[at + len(inner) :]
