"""POST /v1/embeddings, /v1/rerank and /v1/score: bodies as an `OmniRequest`, vectors and scores as answers. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from stage_runtime.coordinator.answering.token_counts import TokenCounts
from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import InvalidRequest, RequestError, describe
from stage_runtime.web.reading import schemas
from stage_runtime.wire.values import OmniRequest, RawTensor, Scores, Usage, Vectors

EMBEDDING: Final = msgspec.json.Decoder(schemas.EmbeddingBody)
RERANK: Final = msgspec.json.Decoder(schemas.RerankBody)
SCORE: Final = msgspec.json.Decoder(schemas.ScoreBody)
MOST: Final = 2048  # OpenAI's bound of inputs

Rows = npt.NDArray[np.float32]


class Collected:
    """The vectors or scores of one request, from whichever terminal stage gives them."""

    def __init__(self, kind: type[Vectors] | type[Scores]) -> None:
        self._kind = kind
        self._counts = TokenCounts()
        self.values: list[Any] = []
        self._other: tuple[str, str] | None = None  #: The first (stage, type) that the route cannot show.

    def add(self, event: AnswerEvent) -> None:
        self._counts.take(event)
        for value in event.data if isinstance(event.data, list) else [event.data]:
            if isinstance(value, self._kind):
                self.values.append((event.stage, value.values))
            elif value is not None and not isinstance(value, Usage):
                self._other = self._other or (event.stage, type(value).__name__)

    @property
    def prompt_tokens(self) -> int:
        return self._counts.total.prompt_tokens

    def rows(self, count: int) -> Rows:
        """A vector for each input. Raises: RequestError: stage_failed: it is something else, or has another number."""
        found = [_array(stage, values) for stage, values in self._given()]
        stage = self.values[0][0]
        if len(sizes := {one.shape[1] for one in found}) > 1:
            raise RequestError(
                "stage_failed", f"omni.Vectors: the vectors have several lengths: {sorted(sizes)}", stage=stage
            )
        made: Rows = _counted("vectors", np.concatenate(found), stage, count)
        return made

    def scores(self, count: int) -> list[float]:
        """A score for each pair. Raises: as `rows`."""
        found = [score for _stage, values in self._given() for score in values]
        if not all(isinstance(one, float | int) and np.isfinite(one) for one in found):
            raise RequestError("stage_failed", "omni.Scores: expected finite numbers", stage=self.values[0][0])
        return list(map(float, _counted("scores", found, self.values[0][0], count)))

    def _given(self) -> list[Any]:
        if self.values:
            return self.values
        stage, kind = self._other or (None, "nothing")
        problem = f"expected an omni.{self._kind.__name__} from a terminal stage, got {kind}"
        raise RequestError("stage_failed", problem, stage=stage)


def _counted(what: str, found: Any, stage: str, count: int) -> Any:
    if len(found) != count:
        problem = f"expected {count} {what}, one for each input, got {len(found)}"
        raise RequestError("stage_failed", problem, stage=stage)
    return found


def _array(stage: str, values: Any) -> Rows:
    """``[n, dimensions]``. Raises: RequestError."""
    wanted = "omni.Vectors: expected finite numbers [n, dimensions], got"
    try:
        if isinstance(values, RawTensor):
            given = _of_raw(values)
        else:
            given = np.asarray(values.float().numpy() if hasattr(values, "numpy") else values)
    except (TypeError, ValueError) as error:  # a dtype that numpy does not have
        raise RequestError("stage_failed", f"{wanted} something else: {describe(error)}", stage=stage) from error
    if given.ndim not in (1, 2) or not given.shape[-1] or given.dtype.kind not in "fiu":
        raise RequestError("stage_failed", f"{wanted} {given.dtype} {list(given.shape)}", stage=stage)
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite
        made = np.atleast_2d(given).astype(np.float32)
    if not np.isfinite(made).all():
        raise RequestError("stage_failed", f"{wanted} {given.dtype} {list(given.shape)}", stage=stage)
    return made


def _of_raw(values: RawTensor) -> npt.NDArray[Any]:
    if values.dtype == "bfloat16":
        halves = np.frombuffer(values.data, np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(values.shape)
    return np.frombuffer(values.data, values.dtype).reshape(values.shape)


# --- embeddings ---------------------------------------------------------------------------------------------------


def inputs(given: str | list[Any]) -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either. Raises: InvalidRequest: names the place."""
    if isinstance(given, str) or (given and all(type(one) is int for one in given)):
        given = [given]
    if not 0 < len(given) <= MOST:
        raise InvalidRequest(f"input: expected 1 to {MOST} inputs, got {len(given)}", param="input")
    texts = all(isinstance(one, str) and one for one in given)
    tokens = all(isinstance(one, list) and one and all(type(id) is int and id >= 0 for id in one) for one in given)
    if not texts and not tokens:
        raise InvalidRequest("input: expected texts, or lists of token ids, that are not empty", param="input")
    return given


def embedding_request(body: schemas.EmbeddingBody, request_id: str) -> OmniRequest:
    given = inputs(body.input)
    return OmniRequest(
        id=request_id,
        kind="embedding",
        inputs={"texts": given} if isinstance(given[0], str) else {"tokens": given},
        params={} if body.dimensions is None else {"dimensions": body.dimensions},
        metadata=body.metadata or {},
    )


def embeddings(body: schemas.EmbeddingBody, found: Collected, model: str) -> dict[str, Any]:
    """The answer. Raises: RequestError."""
    rows = shortened(found.rows(len(inputs(body.input))), body.dimensions)
    shown = [_base64(row) for row in rows] if body.encoding_format == "base64" else rows.tolist()
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(shown)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(found)}


def shortened(rows: Rows, dimensions: int | None) -> Rows:
    """The first ``dimensions`` of each, at length 1, as OpenAI's. Raises: InvalidRequest: there are fewer."""
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    if dimensions > rows.shape[1]:
        problem = f"dimensions: the model's vectors have {rows.shape[1]}, got {dimensions}"
        raise InvalidRequest(problem, param="dimensions")
    cut = rows[:, :dimensions]
    made: Rows = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), np.float32(1e-12))
    return made


def _base64(row: Rows) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _usage(found: Collected) -> dict[str, int]:
    return {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}


# --- scores -------------------------------------------------------------------------------------------------------


def documents(body: schemas.RerankBody) -> list[str]:
    """Their texts."""
    return [one if isinstance(one, str) else one.text for one in body.documents]


def copied_nbytes(text: str | list[str], beside: Sequence[Any]) -> int:
    """Bytes of a text that goes with several others, beyond those of its first copy; 0 of a list."""
    texts = [text] if isinstance(text, str) else text
    return len(texts[0].encode()) * (len(beside) - 1) if len(texts) == 1 and len(beside) > 1 else 0


def rerank_request(body: schemas.RerankBody, request_id: str) -> OmniRequest:
    return _score_request([[body.query, one] for one in documents(body)], request_id)


def rerank(body: schemas.RerankBody, found: Collected, model: str, request_id: str) -> dict[str, Any]:
    """The answer: the likeliest documents first. Raises: RequestError."""
    texts = documents(body)
    scores = found.scores(len(texts))
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or len(texts)]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.return_documents is not False:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    return {"id": request_id, "model": model, "results": results, "usage": _usage(found)}


def pairs(body: schemas.ScoreBody) -> list[list[str]]:
    """Each of ``text_1`` with its counterpart in ``text_2``; one text stands for all. Raises: InvalidRequest."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not 0 < len(first) <= MOST:
        problem = f"text_2: expected as many texts as text_1 has ({len(first)}), got {len(second)}; at most {MOST}"
        raise InvalidRequest(problem, param="text_2")
    return [list(pair) for pair in zip(first, second, strict=True)]


def score_request(body: schemas.ScoreBody, request_id: str) -> OmniRequest:
    return _score_request(pairs(body), request_id)


def scores(body: schemas.ScoreBody, found: Collected, model: str, request_id: str, created: int) -> dict[str, Any]:
    """The answer. Raises: RequestError."""
    values = found.scores(len(pairs(body)))
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(values)]
    base = {"id": request_id, "object": "list", "created": created, "model": model}
    return {**base, "data": data, "usage": _usage(found)}


def _score_request(given: Sequence[Sequence[str]], request_id: str) -> OmniRequest:
    return OmniRequest(id=request_id, kind="score", inputs={"pairs": [list(one) for one in given]})
