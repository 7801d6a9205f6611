"""JSON bodies of the admin routes, whatever their content type: ``curl -d`` sends another one.

Here: reading one. Not here: what it means (`profiling`, `operations`); bodies of clients (`schemas`).
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import strictjson

MAX_BODY: Final = 64 << 10
Decoded = TypeVar("Decoded")


async def read(exchange: Exchange, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
    """The body; none is an empty object. Raises: InvalidRequest."""
    raw = await exchange.body(MAX_BODY) or b"{}"
    try:
        return strictjson.decode(raw, decoder)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)[:500]) from None
