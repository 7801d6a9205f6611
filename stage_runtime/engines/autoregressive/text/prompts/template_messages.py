"""Messages in the form that a chat template takes: where system messages may stand, whether content is text or parts.

The forms that a template takes are tried out with words that are looked for in what it writes; many leave out, without
an error, what they do not know. Called by `prompting`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from stage_runtime.errors import InvalidRequest

Messages = list[dict[str, Any]]
_BETWEEN: Final = "\n\n"  # of two texts that become one message
_WORDS: Final = ("probealpha", "probebravo", "probecharly", "probedelta", "probeecho")


class TemplateForm:
    """The messages that one chat template takes. Found when it is first needed."""

    def __init__(self, write: Callable[[Messages], str]) -> None:
        """write: what the template makes of messages; raises what it raises."""
        self._write = write

    def arrange(self, messages: Sequence[Mapping[str, Any]]) -> Messages:
        """The messages, so that the template writes all of them. Their content is text."""
        known = [dict(one) for one in messages]
        if any(_is_system(one) for one in known):
            known = self._with_systems(known)
        if not self._takes_text:
            known = [_in_parts(one) for one in known]
        return known

    def _with_systems(self, messages: Messages) -> Messages:
        count = next((at for at, one in enumerate(messages) if not _is_system(one)), len(messages))
        first, rest = messages[:count], messages[count:]
        if len(first) > 1 and not self._takes_several:
            first = [{**first[0], "content": _joined(first)}]
        given = [] if not first or self._takes_system else [_joined(first)]
        made = [] if given else first
        for one in rest:
            if _is_system(one) and not self._takes_later:
                given.append(one.get("content") or "")
            elif given and one.get("role") == "user":
                made.append({**one, "content": _BETWEEN.join([*given, one.get("content") or ""])})
                given = []
            else:
                made.append(one)
        return made if not given else _with_last(made, _BETWEEN.join(given))

    @functools.cached_property
    def _takes_system(self) -> bool:
        return self._shows("system", "user")

    @functools.cached_property
    def _takes_several(self) -> bool:
        return self._shows("system", "system", "user")

    @functools.cached_property
    def _takes_later(self) -> bool:
        return self._shows("user", "assistant", "system", "user")

    @functools.cached_property
    def _takes_text(self) -> bool:
        return self._shows("user") or not self._shows("user", parts=True)

    def _shows(self, *roles: str, parts: bool = False) -> bool:
        messages = [{"role": role, "content": word} for role, word in zip(roles, _WORDS, strict=False)]
        try:
            text = self._write([_in_parts(one) for one in messages] if parts else messages)
        except Exception:  # whatever a template raises
            return False
        return all(one["content"] in text for one in messages)


def as_text(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message whose content is text, also where it is in parts. Raises: InvalidRequest: a part is not text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"messages[{index}].content must be a text or a list of parts", param="messages")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            problem = f"messages[{index}] has a part of type {kind!r}; this model takes text"
            raise InvalidRequest(problem, param="messages")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system"


def _joined(messages: Messages) -> str:
    return _BETWEEN.join(one.get("content") or "" for one in messages)


def _with_last(messages: Messages, text: str) -> Messages:
    """A text after the last message, as a user's."""
    if messages and messages[-1].get("role") == "user":
        last = messages[-1]
        return [*messages[:-1], {**last, "content": _BETWEEN.join([last.get("content") or "", text])}]
    return [*messages, {"role": "user", "content": text}]


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message.get("content") or ""}]}
