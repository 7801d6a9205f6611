"""GET /version: which release serves."""

from __future__ import annotations

from importlib import metadata
from typing import Final

import msgspec

from stage_runtime.web.exchanges.exchange import Exchange

DISTRIBUTION: Final = "omnipipeline"


class Version(msgspec.Struct, frozen=True):
    """The answer of `/version`."""

    version: str


def _ours() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout on PYTHONPATH, not installed


OURS: Final = _ours()


async def show(exchange: Exchange) -> None:
    await exchange.reply(msgspec.json.encode(Version(OURS)))
