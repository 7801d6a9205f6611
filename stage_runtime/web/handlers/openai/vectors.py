"""POST /v1/embeddings, /v1/rerank, /v1/score: one request to the stages, one answer. `translating` says what they
mean.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from stage_runtime.web import endpoints, serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import schemas
from stage_runtime.web.translating import vectors
from stage_runtime.web.translating.vectors import Collected
from stage_runtime.wire.values import OmniRequest, Scores, Vectors


class Encoders:
    """Routes of stages that compute vectors of texts, or how well two texts go together."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def embed(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        body = await self._context.read_json(
            exchange, lambda raw: schemas.decode(raw, schemas.EmbeddingBody, vectors.EMBEDDING)
        )
        request = vectors.embedding_request(body, exchange.id)
        found = await self._collect(exchange, request, Collected(Vectors), body.timeout)
        answer = await endpoints.apart(exchange, vectors.embeddings, body, found, self._model)
        await _reply(exchange, answer)

    async def rerank(self, exchange: Exchange) -> None:
        """POST /v1/rerank."""
        body = await self._context.read_json(
            exchange, lambda raw: schemas.decode(raw, schemas.RerankBody, vectors.RERANK)
        )
        self._context.hold_copies(exchange, vectors.copied_nbytes(body.query, body.documents), "query")
        request = vectors.rerank_request(body, exchange.id)
        found = await self._collect(exchange, request, Collected(Scores), body.timeout)
        await _reply(exchange, vectors.rerank(body, found, self._model, exchange.id))

    async def score(self, exchange: Exchange) -> None:
        """POST /v1/score."""
        body = await self._context.read_json(
            exchange, lambda raw: schemas.decode(raw, schemas.ScoreBody, vectors.SCORE)
        )
        given = vectors.pairs(body)
        self._context.hold_copies(exchange, vectors.copied_nbytes(body.text_1, given), "text_1")
        request = vectors.score_request(body, exchange.id)
        found = await self._collect(exchange, request, Collected(Scores), body.timeout)
        await _reply(exchange, vectors.scores(body, found, self._model, exchange.id, int(time.time())))

    @property
    def _model(self) -> str:
        return self._context.settings.model

    async def _collect(
        self, exchange: Exchange, request: OmniRequest, found: Collected, timeout: float | None
    ) -> Collected:
        timeout_s = exchange.timeout_s(timeout)
        await serving.collect(self._context.manager, exchange, request, timeout_s, found.add)
        return found


async def _reply(exchange: Exchange, answer: dict[str, Any]) -> None:
    await exchange.reply(msgspec.json.encode(answer))
