"""Arguments of earlier calls in a prompt as the model wrote them, where a chat template dumps them as JSON. Pure.

Dumped anew, ``1.10`` would be ``1.1`` and the tokens of an agent's history others than those in the prefix cache. So a
template is given a stand-in of each call's arguments, for whose dump their text is put in. A template that reads the
arguments one by one gets them as an object.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from stage_runtime.engines.autoregressive.text.tool_calls.calls import Arguments

_DIGITS: Final = 6  # of a call's number: a body has no million values


class WrittenChat:
    """A chat as a template writes it. text: with the arguments. messages: from which the template has written it."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], *, stand_in: bool) -> None:
        self._secret = f"arguments-{secrets.token_hex(16)}-"
        self._texts: dict[str, str] = {}  #: Arguments, by the key of their stand-in: the secret and a number.
        self.messages = [self._message(message) for message in messages] if stand_in else list(messages)
        self.text = ""

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if not isinstance(arguments, Arguments) or json.dumps(arguments, ensure_ascii=False) == arguments.text:
            return call
        key = f"{self._secret}{len(self._texts):0{_DIGITS}}"
        self._texts[key] = arguments.text
        return {**call, "function": {**function, "arguments": {key: 0}}}

    def has_dumped(self, text: str) -> bool:
        """Whether the template has dumped each stand-in, as JSON on one line, and has not used it otherwise."""
        dumped = _dumps(self._secret).findall(text)
        return len(dumped) == text.count(self._secret) and self._texts.keys() == set(dumped)

    def filled(self, text: str, mark: Callable[[str], str] = str) -> str:
        """The template's text with the arguments. mark: how a client's characters are written in it."""
        if not self._texts:
            return text
        texts = {mark(key): arguments for key, arguments in self._texts.items()}
        return _dumps(mark(self._secret)).sub(lambda found: mark(texts[found[1]]), text)


def written(messages: Sequence[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], str]) -> WrittenChat:
    """write: the template's text of messages. Raises: what it raises."""
    chat = WrittenChat(messages, stand_in=True)
    text = write(chat.messages)
    if not chat.has_dumped(text):
        chat = WrittenChat(messages, stand_in=False)
        text = write(chat.messages)
    chat.text = chat.filled(text)
    return chat


def _dumps(secret: str) -> re.Pattern[str]:
    """All dumps of stand-ins, and the key of each."""
    return re.compile(rf'\{{"({re.escape(secret)}.{{{_DIGITS}}})": ?0\}}')
