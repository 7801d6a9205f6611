"""POST /v1/completions: the body as one `OmniRequest` for each prompt, events as `text_completion` objects. Pure.

Choice ``i`` of prompt ``p`` of a body with ``n`` has the index ``p * n + i``, as OpenAI's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.reading import schemas
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.web.translating.generation import completions, parameters
from stage_runtime.web.translating.generation.token_ids import TokenIds
from stage_runtime.wire.values import Note, OmniRequest, Text

DECODER: Final = msgspec.json.Decoder(schemas.CompletionBody)
MOST_PROMPTS: Final = 128  # as many as OpenAI's choices: each is a request of its own
MAX_TOKENS: Final = 16  # OpenAI's default, and vLLM's
_ID: Final = 120  # characters of an id that is told apart by a number

Prompt = str | list[int]


class CompletionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the answer's shape depends on."""

    prompts: list[Prompt]
    choices: int
    stream: bool
    logprobs: bool
    token_ids: bool
    include_usage: bool
    continuous_usage: bool
    notes: bool  #: Log probabilities of the prompt were asked for, which are notes.


def decode(raw: bytes) -> schemas.CompletionBody:
    return schemas.decode(raw, schemas.CompletionBody, DECODER)


def call(body: schemas.CompletionBody, accepts: Set[str]) -> CompletionCall:
    """Check all that a body may ask for and this pipeline has not.

    Raises: InvalidRequest: names the parameter.
    """
    parameters.check(body, accepts)
    if body.suffix:
        raise InvalidRequest("suffix: this server continues prompts and does not fill them in", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of: expected the value of n, all choices are given out", param="best_of")
    options = body.stream_options or schemas.StreamOptions()
    return CompletionCall(
        prompts=prompts(body.prompt),
        choices=body.n or 1,
        stream=bool(body.stream),
        logprobs=body.logprobs is not None,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        notes=body.prompt_logprobs is not None,
    )


def prompts(given: str | list[Any]) -> list[Prompt]:
    """One text, one list of token ids, or a list of either. Raises: InvalidRequest: names the place."""
    if isinstance(given, str) or (given and all(_is_token(one) for one in given)):
        return [_checked(given, "prompt")]
    if not 0 < len(given) <= MOST_PROMPTS:
        raise InvalidRequest(f"prompt: expected 1 to {MOST_PROMPTS} prompts, got {len(given)}", param="prompt")
    return [_checked(one, f"prompt[{index}]") for index, one in enumerate(given)]


def requests(
    body: schemas.CompletionBody, call: CompletionCall, request_id: str, accepts: Set[str], model: str = ""
) -> list[OmniRequest]:
    """One for each prompt. accepts: as of `call`. model: of `OmniRequest`."""
    params = {"max_tokens": MAX_TOKENS, **parameters.handed_on(body, accepts)}
    single = len(call.prompts) == 1
    return [
        OmniRequest(
            id=request_id if single else f"{request_id[:_ID]}-{index}",
            kind="completion",
            inputs={"text": prompt} if isinstance(prompt, str) else {"tokens": prompt},
            params=params,
            modalities=["text"],
            stream=call.stream,
            metadata=body.metadata or {},
            model=model,
        )
        for index, prompt in enumerate(call.prompts)
    ]


def copied_nbytes(made: Sequence[OmniRequest]) -> int:
    """Bytes of what all these requests have in common, beyond those of its first copy."""
    if len(made) == 1:
        return 0
    return len(msgspec.json.encode((made[0].params, made[0].metadata, made[0].model))) * (len(made) - 1)


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _checked(given: Any, param: str) -> Prompt:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(_is_token(one) for one in given):
        return given
    raise InvalidRequest(f"{param}: expected a text or a list of token ids that is not empty", param=param)


class _Likely(msgspec.Struct, frozen=True):
    """A token of `Text.logprobs`, or another one at its place. None: nothing predicts a prompt's first token."""

    token: str
    logprob: float | None


class _Entry(_Likely, frozen=True):
    """A token of `Text.logprobs`."""

    top_logprobs: tuple[_Likely, ...] = ()


class TextCompletion:
    """Collects the events of all prompts into one answer, or yields chunks of a stream as they come."""

    def __init__(self, *, call: CompletionCall, request_id: str, model: str, created: int) -> None:
        self._call = call
        self._base = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        self._outputs = [Outputs() for _ in call.prompts]
        self._texts: dict[int, list[str]] = {}  #: Texts by choice.
        self._logprobs: dict[int, list[_Entry]] = {}  #: Log probabilities by choice.
        self._notes: list[dict[str, Any]] = []
        self._ids = TokenIds()  #: Token ids by choice of the whole answer.
        self._sizes: dict[int, int] = {}  #: Sizes by choice: characters so far, for the offsets of tokens.

    def add(self, prompt: int, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """The chunks of an event of one prompt."""
        yield from self._shown(prompt, event)
        for index in self._ids.waiting():  # tokens without text
            yield self._chunk(index, "", [])

    def _shown(self, prompt: int, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        for shown in self._outputs[prompt].take(event):
            match shown:
                case Text():
                    index = prompt * self._call.choices + shown.choice
                    self._texts.setdefault(index, []).append(shown.text)
                    entries = _entries(shown, event.stage) if self._call.logprobs else []
                    self._logprobs.setdefault(index, []).extend(entries)
                    yield self._chunk(index, shown.text, entries)
                case Note() if self._call.token_ids and self._ids.take(shown, prompt * self._call.choices):
                    pass
                case Note() if self._call.notes:
                    self._notes.append(completions.note(event.stage, shown))

    def check(self) -> None:
        """Raises: RequestError: stage_failed: the terminals gave nothing that a completion can show."""
        for outputs in self._outputs:
            outputs.check("completions")

    def last(self) -> Iterator[dict[str, Any]]:
        """The last chunks of a stream: the reasons, and the usage if the client requested it."""
        for index in self._indices():
            yield self._chunk(index, "", [], reason=self._reason(index))
        if self._call.include_usage:
            yield {**self._base, "choices": [], "usage": self._usage(), **self._noted()}

    def finish(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(index) for index in self._indices()]
        return {**self._base, "choices": choices, "usage": self._usage(), **self._noted()}

    def _indices(self) -> range:
        return range(len(self._call.prompts) * self._call.choices)

    def _choice(self, index: int) -> dict[str, Any]:
        logprobs = _legacy_logprobs(self._logprobs.get(index, []), 0) if self._call.logprobs else None
        text = "".join(self._texts.get(index, ()))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._reason(index)}
        return {**choice, **self._ids.whole(index)} if self._call.token_ids else choice

    def _reason(self, index: int) -> str:
        prompt, choice = divmod(index, self._call.choices)
        return self._outputs[prompt].reason(choice)

    def _chunk(self, index: int, text: str, entries: Sequence[_Entry], *, reason: str | None = None) -> dict[str, Any]:
        logprobs = None
        if entries:
            offset = self._sizes.get(index, 0)
            logprobs = _legacy_logprobs(entries, offset)
            self._sizes[index] = offset + sum(len(one.token) for one in entries)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **self._ids.next(index)}
        chunk = {**self._base, "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = self._usage() if self._call.continuous_usage else None
        return chunk

    def _usage(self) -> dict[str, Any]:
        return completions.usage_of([one.usage for one in self._outputs])

    def _noted(self) -> dict[str, Any]:
        return {"notes": self._notes} if self._notes else {}


def _entries(shown: Text, stage: str) -> list[_Entry]:
    """Raises: RequestError: stage_failed: the stage gave log probabilities of another form; names the place."""
    try:
        return msgspec.convert(shown.logprobs or [], list[_Entry])
    except msgspec.ValidationError as error:
        problem = str(error).replace("`$", "`omni.Text.logprobs")
        raise RequestError("stage_failed", f"stage {stage!r}: {problem}", stage=stage) from None


def _legacy_logprobs(entries: Sequence[_Entry], offset: int) -> dict[str, Any]:
    """Entries of a chat's ``logprobs.content`` in the form of completions. offset: characters before the first."""
    tokens = [one.token for one in entries]
    offsets = list(itertools.accumulate(map(len, tokens), initial=offset))[: len(tokens)]
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in entries],
        "top_logprobs": [_top(one) for one in entries],
        "text_offset": offsets,
    }


def _top(entry: _Entry) -> dict[str, float | None] | None:
    """The likeliest tokens; the chosen one is among them. None for a prompt's first token, which nothing predicts."""
    if entry.logprob is None:
        return None
    found = {one.token: one.logprob for one in reversed(entry.top_logprobs)}
    return {**found, entry.token: entry.logprob}
