"""The blocks of a paged KV cache: who uses which, and which of the unused ones still hold a known prefix. Pure.

A full block is known by a hash of all tokens up to its end. A block without users keeps its hash until the
block is taken for something else, least recently used first. Block 0 is padding and is never given out.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Final

PADDING: Final = 0
HASH_BYTES: Final = 16


class BlockFault(Exception):
    """A block was used in a way that its owner may not; nothing was changed."""


def hash_blocks(
    tokens: Sequence[int],
    block_size: int,
    known: Sequence[bytes] = (),
    salt: bytes = b"",
    also: Callable[[int, int], bytes] | None = None,
) -> list[bytes]:
    """Hashes of the full blocks of ``tokens``, each over everything before it too.

    known: hashes of the first blocks, computed before. salt: requests with another one share nothing. also: what tokens
    ``start .. end`` are computed from beside their ids.
    """
    hashes = list(known)
    previous = hashes[-1] if hashes else salt
    for end in range((len(hashes) + 1) * block_size, len(tokens) + 1, block_size):
        content = array("q", tokens[end - block_size : end]).tobytes()
        if also is not None:
            content += also(end - block_size, end)
        previous = blake2b(previous + content, digest_size=HASH_BYTES).digest()
        hashes.append(previous)
    return hashes


class BlockPool:
    """Reference counts and the prefix cache.

    Invariants: a block has users or is free, never both; each cached hash names one block, which holds that content.
    """

    def __init__(self, count: int) -> None:
        """count: blocks in all, the padding included."""
        if count < 2:
            raise BlockFault(f"{count} blocks leave none beside the padding")
        self._users = [0] * count
        self._hash_of: list[bytes | None] = [None] * count
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))  #: Next to be taken first.

    @property
    def capacity(self) -> int:
        return len(self._users) - 1

    @property
    def free(self) -> int:
        """Blocks without users, cached ones included."""
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def users(self, block: int) -> int:
        return self._users[block]

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix."""
        found = []
        for one in hashes:
            block = self._cached.get(one)
            if block is None:
                break
            found.append(block)
        return found

    def need(self, found: Sequence[int], fresh: int) -> int:
        """How many free blocks `take` of the ``found`` ones and ``fresh`` others would use up."""
        return fresh + sum(not self._users[block] for block in found)

    def share(self, blocks: Sequence[int]) -> None:
        """Use cached blocks, beside their other users.

        Raises: BlockFault: one of them holds no known content.
        """
        for block in blocks:
            if self._hash_of[block] is None:
                raise BlockFault(f"block {block} is not cached")
        for block in blocks:
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1

    def pin(self, blocks: Sequence[int]) -> None:
        """One more user of blocks in use, whatever they hold. Raises: BlockFault: one of them has no user."""
        for block in blocks:
            if block == PADDING or not self._users[block]:
                raise BlockFault(f"block {block} is to be pinned and has no user")
        for block in blocks:
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """Blocks with unknown content, for one user; the oldest cached ones are forgotten if need be.

        Raises: BlockFault: not so many are free.
        """
        if count > len(self._free):
            raise BlockFault(f"{count} blocks are wanted and {len(self._free)} are free")
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def cache(self, block: int, content: bytes) -> None:
        """A used block is full and its KV is written. If another block holds the same, that one stays the cached one.

        Raises: BlockFault: it has no user, or it was cached with other content.
        """
        if not self._users[block]:
            raise BlockFault(f"block {block} is to be cached and has no user")
        if self._hash_of[block] not in (None, content):
            raise BlockFault(f"block {block} holds something else")
        if content not in self._cached:
            self._cached[content] = block
            self._hash_of[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """One user has finished with its blocks, in order of positions: the last ones are the first to be taken.

        Raises: BlockFault: one of them has no user, or is named twice.
        """
        if len(set(blocks)) != len(blocks):
            raise BlockFault("a block is released twice")
        for block in blocks:
            if block == PADDING or not self._users[block]:
                raise BlockFault(f"block {block} has no user")
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Forget every prefix; users keep their blocks."""
        for block in list(self._cached.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            del self._cached[content]
