"""The results of steps, as outputs for those who asked: one pass over all outputs of a step.

Text, calls, stop strings, log probabilities, delivery. An answer that ends by its text (see `answer_text`) is found
here, so the core hears of it by ``reqs_to_abort``. Output that a reader has not taken yet is joined in its
`RequestOutputCollector`: memory is bounded by the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from stage_runtime.engines.autoregressive.core.engine_requests import GRAMMAR_END, EngineCoreOutput
from stage_runtime.engines.autoregressive.core.output.answer_text import AnswerText, Piece, ShownToken
from stage_runtime.engines.autoregressive.sampling.model_output import GivenRows, TokenLogprobs, joined
from stage_runtime.engines.autoregressive.sampling.parameters import OutputKind, SamplingParams
from stage_runtime.engines.autoregressive.text.detokenizer import Spelling
from stage_runtime.engines.autoregressive.text.reasoning import ThoughtSplitter
from stage_runtime.engines.autoregressive.text.tool_calls.call_parsers import Parser
from stage_runtime.engines.autoregressive.text.tool_calls.calls import Call
from stage_runtime.errors import InvalidRequest, RequestError, describe
from stage_runtime.rules.autoregressive.requests import FinishReason, Reason


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an answer, or all of it. ``generated``: tokens so far. text: without ``calls`` and ``reasoning``.

    reasoning_tokens: so far, of those that were generated.
    refused: the field of the client that has caused an error.
    """

    request_id: str
    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    calls: tuple[Call, ...] = ()
    shown: tuple[ShownToken, ...] = ()
    prompt_tokens: int = 0
    generated: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    reason: Reason = None
    refused: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden_rows: tuple[Any, ...] = ()
    rows: GivenRows | None = None

    @property
    def error(self) -> RequestError:
        """The client's, where the answer ends with one."""
        if self.refused is not None:
            return InvalidRequest(str(self.reason), param=self.refused)
        return RequestError("stage_failed", str(self.reason))

    def joined(self, later: RequestOutput) -> RequestOutput:
        """This and a later delta as one."""
        return msgspec.structs.replace(
            later,
            text=self.text + later.text,
            reasoning=self.reasoning + later.reasoning,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            calls=self.calls + later.calls,
            shown=self.shown + later.shown,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            hidden_rows=self.hidden_rows + later.hidden_rows,
            rows=joined(self.rows, later.rows),
        )


class RequestOutputCollector:
    """One request's outputs that were not taken yet, joined into one. An error replaces them."""

    def __init__(self, kind: OutputKind) -> None:
        self._joins = kind is OutputKind.DELTA
        self._output: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        pending = self._output
        if isinstance(pending, Exception):
            return
        if self._joins and isinstance(pending, RequestOutput) and isinstance(output, RequestOutput):
            output = pending.joined(output)
        self._output = output

    def get_nowait(self) -> RequestOutput | None:
        """The output since it was last asked; None: nothing. Raises: the error that was put."""
        output, self._output = self._output, None
        if isinstance(output, Exception):
            self._output = output
            raise output
        return output


class Processed(NamedTuple):
    """outputs: of requests without a collector. ready: those whose collectors have something new."""

    outputs: list[RequestOutput]
    ready: list[str]
    reqs_to_abort: list[str]


class _RequestState:
    """The part of an answer that is here."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: int,
        collector: RequestOutputCollector | None,
        answer: AnswerText | None,
    ) -> None:
        """answer: None: its tokens become no text."""
        self.params = params
        self.prompt_tokens = prompt_tokens
        self.collector = collector
        self.answer = answer
        self.text = self.reasoning = ""
        self.calls: tuple[Call, ...] = ()
        self.shown: tuple[ShownToken, ...] = ()
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.hidden_rows: tuple[Any, ...] = ()
        self.rows: GivenRows | None = None
        self.generated = 0


class OutputProcessor:
    """Keeps the text of every request. ``decode``: tokens to text, special tokens left out; None: no text.

    spelling: of tokens whose log probabilities are asked for, and of all tokens of answers that show special ones;
    None: neither is done.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, spelling: Spelling | None = None) -> None:
        self._decode = decode
        self._whole = None if spelling is None else spelling.text_of_all
        self._spelling = spelling
        self._states: dict[str, _RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add_request(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_tokens: int,
        collector: RequestOutputCollector | None = None,
        parser: Parser | None = None,
        splitter: ThoughtSplitter | None = None,
    ) -> None:
        """parser: takes calls of tools out of the text; None: it has no tools. splitter: as of `AnswerText`."""
        answer = self._answer_text(params, parser, splitter)
        self._states[request_id] = _RequestState(params, prompt_tokens, collector, answer)

    def extend_request(self, request_id: str, prompt_tokens: int) -> None:
        """Its prompt has so many tokens more."""
        state = self._states.get(request_id)
        if state is not None:
            state.prompt_tokens += prompt_tokens

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> Processed:
        """The only loop over a step's outputs. Those of requests that were aborted here are dropped. Never raises."""
        processed = Processed([], [], [])
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            try:
                made = self._process(state, output, processed)
            except Exception as error:  # such as a tokenizer's, which lacks the token: this answer fails alone
                made = RequestOutput(request_id=output.request_id, finish=FinishReason.ERROR, reason=describe(error))
                if output.finish is None:
                    processed.reqs_to_abort.append(output.request_id)
            if made.finish is not None:
                del self._states[output.request_id]
            if state.params.output_kind is OutputKind.FINAL_ONLY and made.finish is None:
                continue
            if state.collector is None:
                processed.outputs.append(made)
            else:
                state.collector.put(made)
                processed.ready.append(output.request_id)
        return processed

    def _answer_text(
        self, params: SamplingParams, parser: Parser | None, splitter: ThoughtSplitter | None
    ) -> AnswerText | None:
        decode = self._decode if params.skip_special_tokens or self._whole is None else self._whole
        if decode is None:
            return None
        return AnswerText(
            decode,
            stops=params.stop,
            shows_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            parser=parser,
            spelling=self._spelling if params.logprobs is not None else None,
            splitter=splitter,
        )

    def _process(self, state: _RequestState, output: EngineCoreOutput, processed: Processed) -> RequestOutput:
        state.generated += len(output.new_token_ids)
        finish, reason = output.finish, output.reason
        piece = self._piece(state, output)
        text, reasoning, calls, shown = piece.text, piece.reasoning, piece.calls, piece.shown
        if piece.ends:
            if finish is None:
                processed.reqs_to_abort.append(output.request_id)
            finish, reason = FinishReason.STOP, piece.stopped
        token_ids, logprobs, hidden_rows = output.new_token_ids, output.logprobs, output.hidden_rows
        prompt_logprobs, rows = output.prompt_logprobs, output.rows
        if state.params.output_kind is not OutputKind.DELTA:
            state.text += text
            state.reasoning += reasoning
            state.calls += calls
            state.shown += shown
            state.token_ids += token_ids
            state.logprobs += logprobs
            state.hidden_rows += hidden_rows
            state.prompt_logprobs += prompt_logprobs
            text, reasoning = state.text, state.reasoning
            token_ids, logprobs = state.token_ids, state.logprobs
            calls, shown = state.calls, state.shown
            hidden_rows, prompt_logprobs = state.hidden_rows, state.prompt_logprobs
            rows = state.rows = joined(state.rows, rows)
        return RequestOutput(
            request_id=output.request_id,
            text=text,
            reasoning=reasoning,
            reasoning_tokens=0 if state.answer is None else state.answer.reasoning_tokens,
            token_ids=token_ids,
            logprobs=logprobs,
            calls=calls,
            shown=shown,
            prompt_tokens=state.prompt_tokens,
            generated=state.generated,
            cached_tokens=output.cached_tokens,
            finish=finish,
            reason=reason,
            refused=output.refused,
            prompt_logprobs=prompt_logprobs,
            hidden_rows=hidden_rows,
            rows=rows,
        )

    def _piece(self, state: _RequestState, output: EngineCoreOutput) -> Piece:
        """The client's part of new tokens. It ends the answer where its text does, not where its tokens do."""
        if state.answer is None:
            return Piece("")
        # The token that ended the answer is not part of its text, unless a grammar ended with it.
        ended = output.finish is FinishReason.STOP and output.reason != GRAMMAR_END
        silent = int(ended and not state.params.include_stop_str_in_output)
        piece = state.answer.feed(output.new_token_ids, output.logprobs, silent=silent)
        if output.finish is None or piece.ends:
            return piece
        return piece.joined(state.answer.flush(cut=output.finish is FinishReason.LENGTH))
