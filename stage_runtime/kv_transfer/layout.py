"""How an engine's blocks look. Both sides of a room compare it, since bytes of another layout are another prompt's."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

_encode = msgspec.msgpack.Encoder().encode


class KVPage(msgspec.Struct, frozen=True, array_like=True):
    """K or V of a layer, or rows that are kept of it. shape: of one block, ``[block_size, heads, dim]``.

    heads: of all tensor-parallel ranks, so engines of different numbers of ranks have the same layout.
    """

    name: str
    shape: tuple[int, ...]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """order: of a page's axes. weights: a digest of the model's configuration and of some of its weights."""

    model: str
    revision: str
    weights: str
    dtype: str
    block_size: int
    pages: tuple[KVPage, ...]
    order: str = "block, token, head, dim"

    @property
    def digest(self) -> bytes:
        """Repeated by each piece."""
        return blake2b(_encode(self), digest_size=8).digest()

    def difference(self, other: KVLayout) -> str | None:
        """The first field in which another engine's blocks differ, with both values; None: they are the same."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if name == "pages":
                mine, theirs = _pages_apart(mine, theirs)
            return f"{name}: {mine} here, {theirs} there"
        return None


def _pages_apart(mine: tuple[KVPage, ...], theirs: tuple[KVPage, ...]) -> tuple[str, str]:
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"{one.name} {list(one.shape)}", f"{other.name} {list(other.shape)}"
    return f"{len(mine)} pages", f"{len(theirs)} pages"
