"""`omni.Encoder`: texts to vectors, or pairs of texts to scores, by an encoder model of transformers.

Here: batches of requests to rows. Not here: HTTP's form of them; the queue (`batched`). transformers and torch are
imported when a stage is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from stage_runtime import imports
from stage_runtime.api import Encoder
from stage_runtime.engines.autoregressive.model import checkpoints, dtypes
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from stage_runtime.wire.values import Scores, StagePayload, Usage, Vectors

POOLINGS: Final = ("auto", "mean", "cls", "last")
#: Poolings as sentence-transformers names them.
SAID: Final = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last", "mean": "mean", "cls": "cls"}
FORMS: Final = {"texts": "a text", "tokens": "a list of token ids", "pairs": "two texts"}
UNBOUNDED: Final = 1 << 20  # tokenizers without a bound of their own have one far above

Encoded = dict[str, list[int]]


def load(spec: Encoder, *, device: str = "cpu", progress: Callable[[str], None] = lambda text: None) -> EncoderModel:
    """Raises: ConfigurationError: transformers is missing, a value does not fit, or no checkpoint is there."""
    for name in ("max_model_len", "max_requests", "max_batched_tokens"):
        if (number := getattr(spec, name)) is not None and number < 1:
            raise ConfigurationError(f"omni.Encoder({name}={number}): at least 1")
    if spec.pooling not in POOLINGS:
        raise ConfigurationError(f"omni.Encoder(pooling={spec.pooling!r}): expected one of {', '.join(POOLINGS)}")
    if spec.dtype not in dtypes.DTYPES:
        raise ConfigurationError(f"omni.Encoder(dtype={spec.dtype!r}): expected one of {', '.join(dtypes.DTYPES)}")
    dtype = dtypes.chosen("auto", device) if spec.dtype == "auto" else spec.dtype
    path = checkpoints.local(spec.model)
    spec = spec if path is None else structs.replace(spec, model=str(path))
    try:
        with imports.uncollected():
            import torch
            import transformers as untyped

            from stage_runtime.engines.autoregressive.model import models
    except ImportError as error:
        raise ConfigurationError(f"omni.Encoder needs the extra 'engine': {error}") from error
    transformers: Any = untyped
    if spec.threads is not None and device == "cpu":
        torch.set_num_threads(spec.threads)
    progress(f"loading {spec.model}")
    kind = transformers.AutoModelForSequenceClassification if spec.scores else transformers.AutoModel
    model = kind.from_pretrained(spec.model, revision=spec.revision, dtype=getattr(torch, dtype))
    tokenizer = models.load_tokenizer(spec.model, revision=spec.revision, padding_side="right")
    made = structs.replace(spec, pooling=_pooling(spec))
    return EncoderModel(made, model.eval().to(device), tokenizer)


class EncoderModel:
    """A model at hand."""

    def __init__(self, spec: Encoder, model: Any, tokenizer: Any) -> None:
        """spec: its ``pooling`` is chosen; ``auto`` is the mean. tokenizer: pads on the right."""
        self._spec = spec
        self._model = model
        self._tokenizer = tokenizer
        self._texts = TextEncoder(tokenizer, control_strings=spec.control_strings)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.longest = min(_positions(model), tokenizer.model_max_length, spec.max_model_len or UNBOUNDED)

    def run(self, payloads: list[StagePayload]) -> list[Any]:
        """The function of `omni.Batched`: what is wrong with a request fails that request alone."""
        found: list[Any] = []
        for payload in payloads:
            try:
                found.append(self._encoded(payload))
            except Exception as error:
                found.append(error)
        texts = [one for each in found if isinstance(each, list) for one in each]
        rows = iter(self._computed(texts))
        return [each if isinstance(each, Exception) else self._answer(each, rows) for each in found]

    def _encoded(self, payload: StagePayload) -> list[Encoded]:
        inputs = payload.data if isinstance(payload.data, dict) else {}
        name = "pairs" if self._spec.scores else "tokens" if "tokens" in inputs else "texts"
        given = inputs.get(name)
        if not isinstance(given, list) or not given:
            found = "an empty one" if given == [] else type(given).__name__
            problem = f"inputs.{name}: expected a list of {name} for omni.Encoder, got {found}"
            raise InvalidRequest(problem, param="inputs")
        encoded = [self._tokens(name, one) for one in given]
        longest = max(len(one["input_ids"]) for one in encoded)
        if longest > self.longest:
            raise ContextLengthExceeded(longest, self.longest)
        return encoded

    def _tokens(self, name: str, given: Any) -> Encoded:
        match name, given:
            case "tokens", list():
                size = self._model.config.vocab_size
                wrong = [one for one in given if type(one) is not int or not 0 <= one < size]
                if wrong:
                    problem = f"the vocabulary has {size} tokens, and not token {wrong[0]!r:.80}"
                    raise InvalidRequest(problem, param="inputs")
                made: Encoded = {"input_ids": list(given)}
            case "texts", str():
                made = self._texts.around(given)
            case "pairs", [str(), str()]:
                made = self._texts.around(*given)
            case _:
                problem = f"inputs.{name}: expected {FORMS[name]} each, got {type(given).__name__}"
                raise InvalidRequest(problem, param="inputs")
        if not made["input_ids"]:
            raise InvalidRequest(f"inputs.{name}: expected one token or more each, got none", param="inputs")
        return made

    def _computed(self, texts: Sequence[Encoded]) -> list[Any]:
        """A row for each, in order; texts of about one length are computed together, so that little is padding."""
        import torch

        rows: list[Any] = [None] * len(texts)
        with torch.inference_mode():
            for places in self._batches([len(one["input_ids"]) for one in texts]):
                for place, row in zip(places, self._batch([texts[place] for place in places]), strict=True):
                    rows[place] = row
        return rows

    def _batches(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        places: list[int] = []
        for place in sorted(range(len(sizes)), key=lambda place: sizes[place]):
            if places and sizes[place] * (len(places) + 1) > self._spec.max_batched_tokens:
                yield places
                places = []
            places.append(place)
        if places:
            yield places

    def _batch(self, texts: Sequence[Encoded]) -> Any:
        keys = dict.fromkeys(key for one in texts for key in one)
        # Token ids of a client have no types: theirs are those of a text that stands alone.
        rows = {key: [one.get(key) or [0] * len(one["input_ids"]) for one in texts] for key in keys}
        padded = self._tokenizer.pad(rows, return_tensors="pt").to(self._model.device)
        made = self._model(**padded)
        if self._spec.scores:
            return _as_scores(made.logits.float())
        return self._normalized(_pooled(self._spec.pooling, made.last_hidden_state.float(), padded["attention_mask"]))

    def _normalized(self, rows: Any) -> Any:
        import torch

        return torch.nn.functional.normalize(rows, dim=-1) if self._spec.normalize else rows

    def _answer(self, texts: Sequence[Encoded], rows: Iterator[Any]) -> list[Any]:
        import torch

        mine = [next(rows) for _ in texts]
        usage = Usage(prompt_tokens=sum(len(one["input_ids"]) for one in texts))
        if self._spec.scores:
            return [Scores([float(one) for one in mine]), usage]
        return [Vectors(torch.stack(mine).cpu().contiguous()), usage]


def _positions(model: Any) -> int:
    """The number of tokens that a text may have. Models of RoBERTa's kind count positions from that of padding on."""
    given: int = getattr(model.config, "max_position_embeddings", None) or UNBOUNDED
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None) if name.endswith("position_embeddings") else None
        if padding is not None:
            return int(given - padding - 1)
    return given


def _as_scores(logits: Any) -> Any:
    """The probability of the one class, as cross-encoders are trained, or of the second of two."""
    return logits[:, 0].sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)[:, -1]


def _pooled(pooling: str, hidden: Any, mask: Any) -> Any:
    """``[texts, hidden]`` of ``[texts, tokens, hidden]``. Source: sentence-transformers' Pooling."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = mask.sum(1) - 1
        return hidden[range(len(hidden)), last]
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _pooling(spec: Encoder) -> str:
    """``auto``: what the checkpoint says in sentence-transformers' form, else the mean.

    Raises: ConfigurationError: it says something else than these.
    """
    if spec.pooling != "auto" or spec.scores:
        return spec.pooling
    from transformers.utils import cached_file

    file = cached_file(
        spec.model, "1_Pooling/config.json", revision=spec.revision, _raise_exceptions_for_missing_entries=False
    )
    known = {} if file is None else json.loads(Path(file).read_text())
    said = [
        key.removeprefix("pooling_mode_")
        for key, value in known.items()
        if value is True and key.startswith("pooling_mode_")
    ]
    said = said or [str(known.get("pooling_mode", "mean"))]
    if len(said) > 1 or said[0] not in SAID:
        raise ConfigurationError(
            f"{spec.model}: its vectors are made by pooling {' and '.join(said)}; omni.Encoder has mean, cls and last: "
            "name one as pooling"
        )
    return SAID[said[0]]
