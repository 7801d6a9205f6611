"""One answer to a request as its parts come: text, calls of tools, log probabilities. It needs no threads or
sockets.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stage_runtime.api import Generation
from stage_runtime.engines.autoregressive.core.output.answer_text import ShownToken
from stage_runtime.engines.autoregressive.core.output.output_processor import RequestOutput, RequestOutputCollector
from stage_runtime.engines.autoregressive.sampling import parameters
from stage_runtime.engines.autoregressive.text.detokenizer import Spelling
from stage_runtime.engines.autoregressive.text.tool_calls.calls import Call
from stage_runtime.rules.autoregressive.requests import FinishReason
from stage_runtime.wire.values import Text, ToolCall

PIECE: Final = 4096  # entries of tokens that are made at once: more would take several milliseconds of a step


def _stacked(rows: Sequence[Any]) -> Any:
    """``[tokens, hidden]``; None of none."""
    if not rows:
        return None
    import torch

    return torch.stack(list(rows))


class Echo(NamedTuple):
    """A prompt that an answer begins with."""

    text: str
    tokens: Sequence[int]


class Choice:
    """``n`` answers to a request are ``n`` requests of the engine."""

    def __init__(
        self,
        index: int,
        params: parameters.SamplingParams,
        spelling: Spelling,
        echo: Echo | None = None,
        prompt: Sequence[int] = (),
        *,
        kind: str = "chat",
    ) -> None:
        """echo: the prompt that the answer begins with. prompt: its tokens, if asked for. kind: of the request."""
        self.index = index
        self._prompt = tuple(prompt)
        self._echo = echo
        self.collector = RequestOutputCollector(parameters.OutputKind.DELTA)
        self.over = False
        self._text = ""  #: All that was given out.
        self._calls = 0
        self._spelling = spelling
        self._shows = params.logprobs is not None
        #: Clients of completions count tokens by their log probabilities: the token that ends the answer has them, too.
        self._shows_end = kind == "completion" and not params.include_stop_str_in_output  # else it is text
        self._entries: list[Any] = []  #: Entries of the echo's tokens, as far as they are made.

    def echoes(self, output: RequestOutput) -> bool:
        """Make some of the entries that the echo has in ``output``. Returns: whether there are more, before `part`."""
        if self._echo is None or not self._shows:
            return False
        made, tokens, found = self._entries, self._echo.tokens, output.prompt_logprobs
        if not made:  # nothing predicts its first token
            first = _one(self._spelling.bytes_of(tokens[0], first=True), 0.0)
            made.append({**first, "logprob": None, "top_logprobs": []})
        count = min(len(tokens), len(found) + 1)
        some = max(PIECE // (len(found[0].top) + 1), 1) if found else 0
        for at in range(len(made), min(len(made) + some, count)):
            made.append(self._entry(ShownToken(tokens[at], self._spelling.bytes_of(tokens[at]), found[at - 1], False)))
        return len(made) < count

    def part(self, output: RequestOutput, *, last: bool) -> Generation:
        """last: the request's other answers are over."""
        while self.echoes(output):
            pass
        echo, self._echo = self._echo, None
        prompt, self._prompt = self._prompt, ()
        self._text += output.text
        calls = tuple(map(self._numbered, output.calls))
        finish = None if output.finish is None else output.finish.value
        self.over = finish is not None
        if finish == "stop" and self._calls:
            finish = "tool_calls"
        given = output.rows
        return Generation(
            text=output.text,
            reasoning=output.reasoning,
            reasoning_tokens=output.reasoning_tokens,
            answer=self._text,
            tokens=output.token_ids,
            finish=finish,
            ends=last and self.over,
            choice=self.index,
            tool_calls=calls,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.generated,
            cached_tokens=output.cached_tokens,
            logprobs=tuple((one.logprob, one.top) for one in output.logprobs),
            shown_logprobs=self._shown(output) if self._shows else None,
            prompt_logprobs=tuple((one.logprob, one.top) for one in output.prompt_logprobs),
            echo=None if echo is None else self._echoed(echo),
            prompt_token_ids=prompt,
            hidden_rows=_stacked(output.hidden_rows),
            rows={} if given is None else {name: _stacked(rows) for name, rows in given.kept.items()},
            prompt_rows={} if given is None else given.prompt,
            emitted=None if given is None else _stacked(given.emitted),
        )

    def _numbered(self, call: Call) -> ToolCall:
        self._calls += 1
        return ToolCall(f"call_{secrets.token_hex(12)}", call.name, call.arguments, self._calls - 1, self.index)

    def _echoed(self, echo: Echo) -> Text:
        """The prompt as text of this choice."""
        entries, self._entries = self._entries, []
        return Text(echo.text, self.index, entries) if self._shows else Text(echo.text, self.index)

    def _shown(self, output: RequestOutput) -> list[Any]:
        """Entries of the tokens that the text is made of, in the form of OpenAI's ``logprobs.content``."""
        shown = [*output.shown]
        stopped = output.finish is FinishReason.STOP and not isinstance(output.reason, str)  # by a token, not by a text
        if self._shows_end and stopped and output.logprobs:
            token = output.token_ids[-1]
            shown.append(ShownToken(token, self._spelling.bytes_of(token), output.logprobs[-1], False))
        return [self._entry(one) for one in shown]

    def _entry(self, shown: ShownToken) -> dict[str, Any]:
        """The chosen token has the same text among the likeliest ones."""
        top = [
            _one(shown.text if token == shown.token else self._spelling.bytes_of(token, first=shown.first), logprob)
            for token, logprob in shown.logprobs.top
        ]
        return {**_one(shown.text, shown.logprobs.logprob), "top_logprobs": top}


def _one(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(text)}
