"""A stage that draws: a gradient in the colours of its prompt, no model. Edits keep the size of the picture given."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import stage_runtime as omni


def draw() -> Any:
    def run(payload: omni.StagePayload) -> Iterator[omni.Chunk]:
        asked = payload.request.inputs
        width, height = _size(asked)
        for number in range(asked["n"]):
            colours = zlib.crc32(f"{asked['prompt']} {number} {payload.request.params.get('seed', 0)}".encode())
            yield omni.Chunk(omni.Image(_png(_gradient(width, height, colours))))

    return run


def _size(asked: dict[str, Any]) -> tuple[int, int]:
    if asked.get("images"):
        width, height = struct.unpack(">II", asked["images"][0]["data"][16:24])  # of a png's header
        return width, height
    width, height = asked["size"] or (64, 64)
    if width * height > 1 << 20:
        raise omni.InvalidRequest(f"size: at most {1 << 20} pixels, got {width}x{height}", param="size")
    return width, height


def _gradient(width: int, height: int, colours: int) -> Any:
    across, down = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
    corner = np.array([colours & 255, colours >> 8 & 255, colours >> 16 & 255])
    return (corner * across * 0.5 + (255 - corner) * down * 0.5).astype(np.uint8)


def _png(pixels: Any) -> bytes:
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)
