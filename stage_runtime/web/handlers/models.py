"""GET /v1/models: the pipeline's one model."""

from __future__ import annotations

import time

import msgspec

from stage_runtime.errors import RequestError
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.exchange import Exchange


class Models:
    def __init__(self, context: HandlerContext) -> None:
        self._model = {
            "id": context.settings.model,
            "object": "model",
            "created": context.settings.created or int(time.time()),
            "owned_by": "omnipipeline",
        }

    async def list_all(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode({"object": "list", "data": [self._model]}))

    async def one(self, exchange: Exchange) -> None:
        model_id = exchange.scope["path_params"]["id"]
        if model_id != self._model["id"]:
            raise RequestError("not_found", f"no model {model_id!r}; there is {self._model['id']!r}", param="model")
        await exchange.reply(msgspec.json.encode(self._model))
