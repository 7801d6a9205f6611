"""One answer to a request as its parts come: text, calls of tools, log probabilities. Without threads or sockets."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from stage_runtime.api import Generation
from stage_runtime.engines.autoregressive.core.output_processor import RequestOutput, RequestOutputCollector
from stage_runtime.engines.autoregressive.sampling import parameters
from stage_runtime.engines.autoregressive.text.call_forms import Parser
from stage_runtime.engines.autoregressive.text.detokenizer import Spelling
from stage_runtime.engines.autoregressive.text.tools import Call
from stage_runtime.wire.values import ToolCall


def _stacked(rows: Sequence[Any]) -> Any:
    """``[tokens, hidden]``; None of none."""
    if not rows:
        return None
    import torch

    return torch.stack(list(rows))


class Choice:
    """``n`` answers to a request are ``n`` requests of the engine."""

    def __init__(
        self, index: int, params: parameters.SamplingParams, spelling: Spelling, parser: Parser | None
    ) -> None:
        """parser: takes calls of tools out of the text; None: there are no tools."""
        self.index = index
        self.collector = RequestOutputCollector(parameters.OutputKind.DELTA)
        self.over = False
        self._text = ""  #: All that was given out.
        self._calls = 0
        self._parser = parser
        self._spelling = spelling
        self._shows = params.logprobs is not None

    def part(self, output: RequestOutput, *, last: bool) -> Generation:
        """last: the request's other answers are over."""
        text, calls = self._parsed(output)
        self._text += text
        finish = None if output.finish is None else output.finish.value
        self.over = finish is not None
        if finish == "stop" and self._calls:
            finish = "tool_calls"
        return Generation(
            text=text,
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
            hidden_rows=_stacked(output.hidden_rows),
        )

    def _parsed(self, output: RequestOutput) -> tuple[str, tuple[ToolCall, ...]]:
        if self._parser is None:
            return output.text, ()
        text, found = self._parser.feed(output.text)
        if output.finish is not None:
            rest, late = self._parser.flush()
            text, found = text + rest, found + late
        return text, tuple(map(self._numbered, found))

    def _numbered(self, call: Call) -> ToolCall:
        self._calls += 1
        return ToolCall(f"call_{secrets.token_hex(12)}", call.name, call.arguments, self._calls - 1, self.index)

    def _shown(self, output: RequestOutput) -> list[Any]:
        """As OpenAI's ``logprobs.content``."""
        return [
            {**self._one(token, found.logprob), "top_logprobs": [self._one(*one) for one in found.top]}
            for token, found in zip(output.token_ids, output.logprobs, strict=False)
        ]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, spelled = self._spelling.text_of(token), self._spelling.bytes_of(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(spelled)}
