"""The instances that have met the beginning of a prompt, so that a request goes where its prefix is cached. Pure.

The coordinator hashes what clients sent, in pieces of `PIECE_NBYTES`, and remembers the instances that requests with
the same pieces were bound to. It reads no tokens and asks no instance, so a hint may be wrong: that costs speed alone,
since an engine finds a prefix by its tokens and its salt, whatever it was told. Load decides against a hint
(`kept`). Nothing of it can be set by a client. Called by `coordinator.request_manager` and
`rules.binding.membership_state`, and for the engines of one instance, by tokens, by `rules.autoregressive.balancing`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, TypeAlias, TypeVar

from stage_runtime.rules.binding.balancing import SPILL_FACTOR, SPILL_REQUESTS, Load
from stage_runtime.rules.binding.pools import Pool

Hashes: TypeAlias = Sequence[bytes]  #: Hashes of a prompt's first pieces: each depends on all before it.
Hints: TypeAlias = Mapping[str, int]  #: incarnation -> how many first pieces of the prompt it has met.

PIECE_NBYTES: Final = 256  # about 64 tokens, a few blocks of a cache
PIECES_MOST: Final = 64  # 16 KiB: prompts that are equal so far are of one conversation, or of one document
DEPTH_MOST: Final = 16  # of values in values: prompts have few
NBYTES_MOST: Final = PIECE_NBYTES * PIECES_MOST
TOKENS_MOST: Final = NBYTES_MOST // array("i").itemsize  # of a prompt of tokens: each piece is 64
WHOLE_WORTH: Final = 8  # pieces for which a request waits as long as for any prefix: about 500 tokens
KEPT_MOST: Final = 1 << 15  # pieces, about 8 MiB
HOLDERS_MOST: Final = 4  # of one piece: a beginning that all prompts share is everywhere soon

L = TypeVar("L", bound=Load)


def hashes(kind: str, inputs: Any, params: Mapping[str, Any]) -> Hashes:
    """Hashes of the parts from which a prompt is made. Empty: it is short."""
    if isinstance(inputs, Mapping) and isinstance(inputs.get("messages"), list):
        parts: Iterable[Any] = [params.get("tools"), *inputs["messages"]]
    else:
        parts = [inputs]
    digest, found, rest = blake2b(kind.encode(), digest_size=8), list[bytes](), bytearray()
    for part in _flat(list(parts)):
        rest += part
        while len(rest) >= PIECE_NBYTES:
            digest.update(rest[:PIECE_NBYTES])
            found.append(digest.digest())
            del rest[:PIECE_NBYTES]
            if len(found) == PIECES_MOST:
                return found
    return found


def token_hashes(tokens: Sequence[int], *beside: str) -> Hashes:
    """The same of a prompt's tokens, as far as they are tokens: a negative number stands for a row of embeddings.

    beside: whatever else the keys and values depend on, such as an adapter.
    """
    try:
        begin = array("i", tokens[:TOKENS_MOST])
    except (TypeError, OverflowError):  # not tokens: the engine refuses them
        return ()
    rows = next((place for place, token in enumerate(begin) if token < 0), len(begin))
    return hashes("tokens", [*beside, begin[:rows].tobytes()], {})


def _flat(value: Any, depth: int = 0) -> Iterator[bytes]:
    """All that a value holds, in order. No length of a whole comes before its parts: a prompt may have more of them.

    Each value gives something, so that a list of a million empty ones is left after the first few thousand.
    """
    match value:
        case str():
            yield b'"'
            for at in range(0, len(value), PIECE_NBYTES):
                yield value[at : at + PIECE_NBYTES].encode(errors="surrogatepass")
        case bytes() | bytearray():
            yield b"b" + value[:NBYTES_MOST]
        case int() if value.bit_length() > 64:  # the digits of a huge one take long, and there may be too many
            yield b" int"
        case bool() | int() | float() | None:
            yield f" {value}".encode()
        case Mapping() if depth < DEPTH_MOST:
            yield b"{"
            for name, part in value.items():
                yield from _flat(name, depth + 1)
                yield from _flat(part, depth + 1)
        case list() | tuple() if depth < DEPTH_MOST:
            yield b"["
            for part in value:
                yield from _flat(part, depth + 1)
        case _:  # of arrays, objects of authors: their beginning says little
            yield type(value).__name__.encode()


class Prefixes:
    """The pieces that were met least recently are forgotten first."""

    def __init__(self, most: int = KEPT_MOST) -> None:
        self._most = most
        #: Holders of each piece, the latest one last.
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, prompt: Hashes, instances: Iterable[str]) -> None:
        """A request with this prompt is bound to these instances."""
        bound = tuple(instances)
        for piece in prompt:
            others = tuple(one for one in self._holders.get(piece, ()) if one not in bound)
            self._holders[piece] = (*others, *bound)[-max(HOLDERS_MOST, len(bound)) :]
            self._holders.move_to_end(piece)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def hints(self, prompt: Hashes) -> dict[str, int]:
        """The holders of this prompt's beginning, and how far."""
        found: dict[str, int] = {}
        for depth, piece in enumerate(prompt, start=1):
            holders = self._holders.get(piece)
            if holders is None:
                break
            found.update(dict.fromkeys(holders, depth))
        return found


def kept(pool: Pool[L], hints: Hints, without: Collection[str], chosen: L) -> L:
    """The instance of ``pool`` that has met most of the prompt, unless it is so much more loaded than ``chosen`` that
    computing the prefix again is better; then the one that has met most of the rest. The longer the prefix, the more.
    """
    holders = [
        (depth, pool.items[pool.position(name)])
        for name, depth in hints.items()
        if name in pool and name not in without
    ]
    holders.sort(key=lambda one: (-one[0], one[1].score, one[1].turn))
    for depth, holder in holders:
        share = min(1.0, depth / WHOLE_WORTH)
        if holder.score <= chosen.score * (1 + (SPILL_FACTOR - 1) * share) + SPILL_REQUESTS * share:
            return holder
    return chosen
