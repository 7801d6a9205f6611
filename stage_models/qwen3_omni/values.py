"""The values that the stages of a Qwen3-Omni pipeline exchange. No torch: tensors are of any type."""

from __future__ import annotations

from typing import Any

import msgspec

import stage_runtime as omni


@omni.message
class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the thinker's prompt, with places for the rows of its media.

    tokens: one image or audio token for each row that the encoders will give. grids: of each image, ``[t, h, w]`` in
    patches. audio: rows of each sound. voice: in which the answer is spoken; None: it is not.
    """

    tokens: list[int]
    grids: list[list[int]] = []
    audio: list[int] = []
    voice: str | None = None

    @property
    def image_tokens(self) -> int:
        return sum(rows_of(grid) for grid in self.grids)

    @property
    def audio_tokens(self) -> int:
        return sum(self.audio)


MERGE = 2  #: Patches of a side that the vision encoder joins to one row; checked when the encoder is loaded.


def rows_of(grid: list[int], merge: int = MERGE) -> int:
    t, h, w = grid
    return t * h * w // merge**2


@omni.message
class Pictures(msgspec.Struct, frozen=True, kw_only=True):
    """pixels: of each image its patches, f32 ``[t * h * w, values]``. keys: of each image, equal for equal ones."""

    pixels: list[Any]
    grids: list[list[int]]
    keys: list[str]


@omni.message
class Sounds(msgspec.Struct, frozen=True, kw_only=True):
    """features: of each sound its mel frames, f32 ``[mel, frames]``. keys: of each sound, equal for equal ones."""

    features: list[Any]
    keys: list[str]


@omni.message
class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """rows: of all images in order, ``[rows, hidden]``. deepstack: of each named layer, ``[rows, hidden]``."""

    rows: Any
    deepstack: list[Any]


@omni.message
class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """rows: of all sounds in order, ``[rows, hidden]``."""

    rows: Any


@omni.message
class Understood(msgspec.Struct, frozen=True, kw_only=True):
    """The thinker's input: the prompt and the rows of its media."""

    prepared: Prepared
    seen: Seen | None = None
    heard: Heard | None = None


@omni.message
class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a request's chunks from the thinker to the talker.

    tokens: the thinker's prompt. embeddings: its input rows, ``[tokens, hidden]``. hidden: rows of the accepted layer
    where ``tokens`` are media, ``[rows, hidden]``. grids: of the images.
    """

    tokens: list[int]
    embeddings: Any
    hidden: Any
    grids: list[list[int]]
    voice: str


@omni.message
class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of tokens that the thinker has generated, ``[tokens, hidden]``.

    begins: the first of them is among these; without rows then, the answer has no words.
    """

    rows: Any
    begins: bool = False


@omni.message
class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the thinker's answer. spoken: the talker speaks it."""

    usage: omni.Usage
    finish: str
    spoken: bool = False


@omni.message
class Frames(msgspec.Struct, frozen=True, kw_only=True):
    """Frames of codes from the talker, whole numbers ``[frames, groups]``."""

    codes: Any
