"""GET /v1/models: the pipeline's one model, and its LoRA adapters."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from stage_runtime.errors import RequestError
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.exchange import Exchange


class Models:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._model = {
            "id": context.settings.model,
            "object": "model",
            "created": context.settings.created or int(time.time()),
            "owned_by": "omnipipeline",
        }

    def _all(self) -> list[dict[str, Any]]:
        parent = self._model["id"]
        adapters = sorted(self._context.adapter_names.known() or ())
        return [self._model, *({**self._model, "id": name, "parent": parent} for name in adapters if name != parent)]

    async def list_all(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode({"object": "list", "data": self._all()}))

    async def one(self, exchange: Exchange) -> None:
        model_id = exchange.scope["path_params"]["id"]
        models = self._all()
        found = next((one for one in models if one["id"] == model_id), None)
        if found is None:
            there = ", ".join(repr(one["id"]) for one in models)
            raise RequestError("not_found", f"no model {model_id!r}; there is {there}", param="model")
        await exchange.reply(msgspec.json.encode(found))
