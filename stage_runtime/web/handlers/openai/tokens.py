"""POST /tokenize, /detokenize: one request, one answer. `translating.generation.tokens` says what they mean."""

from __future__ import annotations

import msgspec

from stage_runtime.web import serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import schemas
from stage_runtime.web.translating import media
from stage_runtime.web.translating.generation import tokens
from stage_runtime.web.translating.generation.tokens import Told


class Tokens:
    """The tokens of a stage's model."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        context = self._context
        body = await context.read_json(exchange, lambda raw: schemas.decode(raw, schemas.TokenizeBody, tokens.TOKENIZE))
        places = list(media.to_fetch(body.messages or []))
        fetched = await context.fetcher.fetch(places, exchange.reservation.add) if places else {}
        request, told = tokens.tokenize_request(body, exchange.id, fetched), Told()
        await serving.collect(context.manager, exchange, request, exchange.timeout_s(body.timeout), told.add)
        await exchange.reply(msgspec.json.encode(told.tokenized(strings=bool(body.return_token_strs))))

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize."""
        body = await self._context.read_json(
            exchange, lambda raw: schemas.decode(raw, schemas.DetokenizeBody, tokens.DETOKENIZE)
        )
        request, told = tokens.detokenize_request(body, exchange.id), Told()
        await serving.collect(self._context.manager, exchange, request, exchange.timeout_s(body.timeout), told.add)
        await exchange.reply(msgspec.json.encode(told.detokenized()))
