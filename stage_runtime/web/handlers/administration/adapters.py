"""The routes by which vLLM's clients load and drop LoRA adapters. It is on the admin port, behind the API keys."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from stage_runtime.coordinator.questions.adapters import AdapterChanges
from stage_runtime.errors import InvalidRequest
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import bodies

WITHIN_S: Final = 300.0  # an adapter is read from a disk that may be a network's
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
FolderPath = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/load_lora_adapter. lora_path: a folder at each instance."""

    lora_name: Name
    lora_path: FolderPath
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/unload_lora_adapter. lora_int_id: vLLM's number, which nothing needs."""

    lora_name: Name
    lora_int_id: int | None = None


class LoadedAdapters:
    def __init__(self, adapters: AdapterChanges, *, model: str) -> None:
        """model: the pipeline's name, which no adapter can have."""
        self._adapters = adapters
        self._model = model

    async def load(self, exchange: Exchange) -> None:
        body = await bodies.read(exchange, _loads)
        if body.lora_name == self._model:
            raise InvalidRequest(f"lora_name: {body.lora_name!r} is the name of the model", param="lora_name")
        if body.load_inplace:
            raise InvalidRequest("load_inplace: unload the adapter, then load it", param="load_inplace")
        await self._adapters.load(body.lora_name, body.lora_path, timeout_s=WITHIN_S)
        await _say(exchange, f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, exchange: Exchange) -> None:
        body = await bodies.read(exchange, _unloads)
        await self._adapters.unload(body.lora_name, timeout_s=WITHIN_S)
        await _say(exchange, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


_loads = msgspec.json.Decoder(LoadAdapterBody)
_unloads = msgspec.json.Decoder(UnloadAdapterBody)


async def _say(exchange: Exchange, text: str) -> None:
    await exchange.reply(text.encode(), content_type=b"text/plain; charset=utf-8")
