"""The records that the two ends of a room write to each other: the prompt that is asked for, and the header of a piece.

Both come from another process: they are decoded into these types and checked, and nothing in them names memory of the
receiver but the index of a block in the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stage_runtime.errors import UNDECODABLE, ProtocolError, describe
from stage_runtime.kv_transfer.layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

KEY_BYTES: Final = 16
NONCE_BYTES: Final = 12
MAC_BYTES: Final = 1 << 30  # at once; OpenSSL takes up to 2 GiB


class AddedAfter(msgspec.Struct, frozen=True, array_like=True):
    """Rows that are added after a layer. places: tokens of the prompt."""

    layer: int
    places: tuple[int, ...]


class PromptAsk(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks ``first .. end`` of a prompt, which has ``end`` full blocks.

    key: random, of this ask alone; each piece repeats it. checksum: pieces carry one of their bytes. adapter: the name
    of a LoRA adapter, which must have files of this digest at both ends.
    Its tensors: token ids (int64 ``[tokens]``), then, as the flags say, rows ``[rows, hidden]``, positions
    ``[3, tokens]``, and one tensor of rows for each of ``added``.
    """

    key: bytes
    layout: KVLayout
    first: int
    end: int
    embeds: bool = False
    positions: bool = False
    position_delta: int = 0
    added: tuple[AddedAfter, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    checksum: bool = True
    adapter: str = ""
    adapter_digest: bytes = b""


class PieceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks ``first .. first + count`` of the prompt.

    prompt: `prompt_digest` of what prefill has computed. layout: `KVLayout.digest` of its blocks. computed_s: when
    they were computed, in seconds after the ask came, by prefill's clock.
    """

    key: bytes
    prompt: bytes
    layout: bytes
    first: int
    count: int
    checksum: bytes | None = None
    computed_s: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode_ask = msgspec.msgpack.Decoder(PromptAsk).decode
_decode_header = msgspec.msgpack.Decoder(PieceHeader).decode


def encode(record: PromptAsk | PieceHeader) -> bytes:
    return _encode(record)


def decode_ask(record: bytes, tensors: Sequence[Tensor]) -> PromptAsk:
    """Raises: ProtocolError: it is something else, or its tensors are not those that it names."""
    try:
        ask = _decode_ask(record)
    except UNDECODABLE as error:
        raise ProtocolError(f"an ask for KV: {describe(error)}") from error
    if not 0 <= ask.first < ask.end:
        raise ProtocolError(f"an ask for KV: blocks {ask.first} to {ask.end}")
    wanted = 1 + ask.embeds + ask.positions + len(ask.added)
    if len(tensors) != wanted or str(tensors[0].dtype) != "torch.int64" or tensors[0].ndim != 1:
        raise ProtocolError(f"an ask for KV: expected {wanted} tensors, the first one of token ids, got {len(tensors)}")
    if len(tensors[0]) != ask.end * ask.layout.block_size:
        raise ProtocolError(f"an ask for KV: {len(tensors[0])} tokens for {ask.end} blocks")
    return ask


def decode_header(header: bytes) -> PieceHeader:
    """Raises: ProtocolError: it is something else."""
    try:
        found = _decode_header(header)
    except UNDECODABLE as error:
        raise ProtocolError(f"a piece of KV: {describe(error)}") from error
    if not 0 <= found.computed_s < math.inf:
        raise ProtocolError(f"a piece of KV: computed_s: expected seconds, got {found.computed_s}")
    return found


def prompt_digest(ask: PromptAsk, tensors: Sequence[Tensor]) -> bytes:
    """A digest of all that the keys and values depend on, as both sides have it."""
    digest = blake2b(_encode((ask.position_delta, ask.added, ask.cache_salt, ask.adapter_digest)), digest_size=16)
    for one in tensors:
        digest.update(_encode((str(one.dtype), list(one.shape))))
        digest.update(_bytes(one))
    return digest.digest()


def checksum(header: PieceHeader, flat: Tensor) -> bytes:
    """A checksum of a piece's bytes and of what its header says of them: GMAC under the ask's key, 16 bytes.

    It is five times as fast as zlib's crc32, since processors have instructions for it. It proves nothing about who has
    sent the piece: the key crosses with the ask. Raises: ProtocolError: the header has another key.
    """
    if len(header.key) != KEY_BYTES:
        raise ProtocolError(f"a piece of KV: a key of {len(header.key)} bytes")
    mac = AESGCM(header.key)
    tag = mac.encrypt(bytes(NONCE_BYTES), b"", _encode(msgspec.structs.replace(header, checksum=None)))
    whole = memoryview(_bytes(flat))
    for start in range(0, max(len(whole), 1), MAC_BYTES):
        tag = mac.encrypt(tag[:NONCE_BYTES], b"", whole[start : start + MAC_BYTES])
    return tag


def _bytes(tensor: Tensor) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
