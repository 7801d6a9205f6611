"""Pictures and sounds to rows of the thinker: requests in one batch, and a bounded cache by content.

A batch is a pass of the encoder over what the cache lacks, each medium once; many large pictures take several passes.
Called on the stage's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from stage_models.qwen3_omni import values

#: Patches of one pass: more than one picture may have in the published checkpoint. Those of all requests of a batch
#: would take the memory of many.
MOST_PATCHES: Final = 1 << 16
Rows = TypeVar("Rows")


class ContentCache(Generic[Rows]):
    """The newest values up to a number of bytes, by the key of what they were computed from."""

    def __init__(self, capacity: int, nbytes: Callable[[Rows], int]) -> None:
        """capacity: bytes; 0 keeps nothing."""
        self.capacity = capacity
        self.nbytes = 0  #: Bytes of what is kept; at most ``capacity``.
        self.hits = 0
        self.misses = 0
        self._nbytes = nbytes
        self._kept: OrderedDict[str, Rows] = OrderedDict()  #: The one used last at the end.

    def gauges(self) -> dict[str, float]:
        """Values for `omni.Batched.gauges`."""
        return {"cache_hits_total": self.hits, "cache_misses_total": self.misses, "cache_bytes": self.nbytes}

    def get(self, key: str) -> Rows | None:
        found = self._kept.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return found

    def put(self, key: str, rows: Rows) -> None:
        """One that is larger than the whole cache is not kept."""
        size = self._nbytes(rows)
        if key in self._kept or size > self.capacity:
            return
        self._kept[key] = rows
        self.nbytes += size
        while self.nbytes > self.capacity:
            _key, oldest = self._kept.popitem(last=False)
            self.nbytes -= self._nbytes(oldest)


class ImageRows:
    """Rows of one image: those of the prompt, and those that are added after named layers."""

    def __init__(self, rows: Tensor, deepstack: Sequence[Tensor]) -> None:
        self.rows = rows
        self.deepstack = list(deepstack)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.rows, *self.deepstack))


class ImageEncoder:
    def __init__(self, model: Any, *, cache_bytes: int) -> None:
        """model: `Qwen3OmniMoeVisionEncoder`, in evaluation mode."""
        if int(model.config.spatial_merge_size) != values.MERGE:
            raise ValueError(f"the encoder merges {model.config.spatial_merge_size} patches a side, not {values.MERGE}")
        self._model = model
        self._device = next(model.parameters()).device
        self.cache: ContentCache[ImageRows] = ContentCache(cache_bytes, lambda one: one.nbytes)

    def encode(self, batch: Sequence[values.Pictures]) -> list[values.Seen]:
        found = _encoded(
            self.cache,
            [key for one in batch for key in one.keys],
            [(pixels, grid) for one in batch for pixels, grid in zip(one.pixels, one.grids, strict=True)],
            self._encode,
        )
        return [_seen([found[key] for key in one.keys]) for one in batch]

    def _encode(self, images: Sequence[tuple[Tensor, list[int]]]) -> list[ImageRows]:
        return [rows for some in _passes(images) for rows in self._pass(some)]

    @torch.no_grad()
    def _pass(self, images: Sequence[tuple[Tensor, list[int]]]) -> list[ImageRows]:
        grids = torch.tensor([grid for _pixels, grid in images], device=self._device)
        pixels = torch.cat([one for one, _grid in images]).to(self._device, next(self._model.parameters()).dtype)
        out = self._model(pixels, grid_thw=grids, return_dict=True)
        sizes = [values.rows_of(grid) for _pixels, grid in images]
        layers = [layer.split(sizes) for layer in out.deepstack_features]
        pooled = out.pooler_output
        rows = torch.cat(list(pooled)) if isinstance(pooled, list | tuple) else pooled
        return [ImageRows(_own(one), [_own(layer[at]) for layer in layers]) for at, one in enumerate(rows.split(sizes))]


def _passes(images: Sequence[tuple[Tensor, list[int]]]) -> Iterator[list[tuple[Tensor, list[int]]]]:
    """The images in order, as many at a time as have `MOST_PATCHES`; one that has more is alone."""
    some: list[tuple[Tensor, list[int]]] = []
    patches = 0
    for image in images:
        if some and patches + len(image[0]) > MOST_PATCHES:
            yield some
            some, patches = [], 0
        some.append(image)
        patches += len(image[0])
    if some:
        yield some


class AudioEncoder:
    def __init__(self, model: Any, *, cache_bytes: int) -> None:
        """model: `Qwen3OmniMoeAudioEncoder`, in evaluation mode."""
        self._model = model
        self._device = next(model.parameters()).device
        self.cache: ContentCache[Tensor] = ContentCache(cache_bytes, lambda rows: rows.nbytes)

    def encode(self, batch: Sequence[values.Sounds]) -> list[values.Heard]:
        keys: list[list[str]] = []
        padded: list[tuple[Tensor, int]] = []
        for one in batch:
            widths = [self._width(features, one.features) for features in one.features]
            keys.append([f"{key}/{width}" for key, width in zip(one.keys, widths, strict=True)])
            padded += zip(one.features, widths, strict=True)
        found = _encoded(self.cache, [key for some in keys for key in some], padded, self._encode)
        return [values.Heard(rows=torch.cat([found[key] for key in some])) for some in keys]

    def _width(self, features: Tensor, beside: Sequence[Tensor]) -> int:
        """Frames to which the encoder pads the sound's last window: those of the widest window of the request.

        A sound shorter than one window has other rows beside a longer one, in transformers as in the published model.
        """
        window = 2 * int(self._model.n_window)
        widest = max(min(one.shape[1], window) for one in beside)
        return widest if features.shape[1] < widest else 0

    @torch.no_grad()
    def _encode(self, sounds: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """One after the other, so that a sound's rows do not depend on other requests."""
        dtype = next(self._model.parameters()).dtype
        found = []
        for features, width in sounds:
            lengths = [features.shape[1], *([width] if width else [])]
            joined = functional.pad(features, (0, width)).to(self._device, dtype)  # silence, for its width
            out = self._model(joined, feature_lens=torch.tensor(lengths, device=self._device), return_dict=True)
            rows = out.last_hidden_state
            found.append(_own(rows[: len(rows) - self._rows(width)] if width else rows))
        return found

    def _rows(self, frames: int) -> int:
        from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

        return int(_get_feat_extract_output_lengths(frames, int(self._model.n_window)))


Medium = TypeVar("Medium")


def _encoded(
    cache: ContentCache[Rows],
    keys: Sequence[str],
    media: Sequence[Medium],
    encode: Callable[[list[Medium]], list[Rows]],
) -> dict[str, Rows]:
    """The rows of each medium by its key; what the cache lacks is computed once."""
    found: dict[str, Rows] = {}
    lacking: dict[str, Medium] = {}
    for key, medium in zip(keys, media, strict=True):
        if key in found or key in lacking:
            cache.hits += 1
        elif (kept := cache.get(key)) is not None:
            found[key] = kept
        else:
            lacking[key] = medium
    if lacking:
        for key, rows in zip(lacking, encode(list(lacking.values())), strict=True):
            found[key] = rows
            cache.put(key, rows)
    return found


def _seen(images: Sequence[ImageRows]) -> values.Seen:
    layers = zip(*(one.deepstack for one in images), strict=True)
    return values.Seen(rows=torch.cat([one.rows for one in images]), deepstack=[torch.cat(list(one)) for one in layers])


def _own(rows: Tensor) -> Tensor:
    """A copy of the rows on the CPU: a view would keep the whole batch in the cache."""
    return rows.detach().to("cpu", torch.float32, copy=True)
