"""Rows of layers that a stage gives out (``keep_rows``), kept beside the KV cache; and rows that a decoder makes.

A kept layer has a buffer of pages as the KV cache has: a prompt that finds its beginning in the prefix cache finds its
rows there, too, and a preempted one writes them again. Used by the model runner alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.model.models import Computed, PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import Page
from stage_runtime.engines.autoregressive.sampling.model_output import GivenRows
from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.autoregressive.requests import Request

PROMPT = ("prompt", "all")
ANSWER = ("answer", "all")


class OwnRows:
    """The rows of one request whose decoder computes each next row."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []  #: ``[hidden]`` of each generated token but the last, on the host.
        self.state: dict[str, Any] = {}  #: The decoder's own.


class KeptRows:
    """The rows that ``keep_rows`` names."""

    def __init__(
        self, names: Mapping[str, Sequence[Any]], model: PagedModel, *, num_blocks: int, block_size: int
    ) -> None:
        """names: name -> (layer, of), see `Autoregressive`. Raises: ConfigurationError: the model has no such layer."""
        self._names = {name: (int(layer), str(of)) for name, (layer, of) in names.items()}
        self._model = model
        self._size = block_size
        count = len(model.decoder_layers)
        for name, (layer, of) in self._names.items():
            if not 0 <= layer <= count:
                raise ConfigurationError(f"keep_rows[{name!r}]: the model has layers 1 to {count}, and 0 for its input")
            if of not in ("prompt", "answer", "all"):
                raise ConfigurationError(f"keep_rows[{name!r}]: expected prompt, answer or all, got {of!r}")
        #: Modules whose outputs are kept: layer k of the names is module k - 1.
        self.layers = tuple(sorted({layer - 1 for layer, _of in self._names.values() if layer}))
        paged = {layer - 1 for layer, of in self._names.values() if layer and of in PROMPT}
        shape = (num_blocks, block_size, model.row_size or 0)
        self._pages = {layer: torch.zeros(shape, dtype=model.dtype, device=model.device) for layer in paged}

    def regions(self) -> Sequence[Page]:
        """The rows of prompts, which cross with the keys and values."""
        return [Page(f"{layer}.rows", self._pages[layer]) for layer in sorted(self._pages)]

    @staticmethod
    def token_bytes(names: Mapping[str, Sequence[Any]], model: PagedModel) -> int:
        """The bytes of one token in the buffers."""
        layers = {int(layer) for layer, of in names.values() if layer and of in PROMPT}
        return int(len(layers) * (model.row_size or 0) * model.dtype.itemsize)

    def write(self, kept: Mapping[int, Tensor], slots: Tensor) -> None:
        """A pass has computed these rows, ``[T, hidden]`` by layer. slots: of its tokens in the cache."""
        for layer, pages in self._pages.items():
            pages.view(-1, pages.shape[-1]).index_copy_(0, slots, kept[layer])

    def of_token(self, token: int, at: int, computed: Computed) -> GivenRows:
        """The rows of a new token, which was chosen from the row ``at`` of the pass."""
        kept: dict[str, tuple[Any, ...]] = {}
        for name, (layer, of) in self._names.items():
            if of in ANSWER:
                row = self._embedded([token])[0] if layer == 0 else computed.kept[layer - 1][at]
                kept[name] = (_given(row),)
        return GivenRows(kept=kept)

    def of_prompt(self, request: Request, blocks: Sequence[int]) -> GivenRows:
        """The rows of a prompt that is computed to its end."""
        found: dict[str, Any] = {}
        for name, (layer, of) in self._names.items():
            if of in PROMPT:
                rows = self._prompt_inputs(request) if layer == 0 else self._paged(layer - 1, request, blocks)
                found[name] = _given(rows)
        return GivenRows(prompt=found)

    def _paged(self, layer: int, request: Request, blocks: Sequence[int]) -> Tensor:
        pages = self._pages[layer]
        used = torch.tensor(list(blocks[: -(-request.prompt_tokens // self._size)]), device=pages.device)
        return pages[used].flatten(0, 1)[: request.prompt_tokens]

    def _prompt_inputs(self, request: Request) -> Tensor:
        tokens = request.tokens[: request.prompt_tokens]
        rows = self._embedded([max(token, 0) for token in tokens]).clone()  # of no inference mode: written into below
        if request.rows is None:
            return rows
        for at, some in request.rows.within(0, request.prompt_tokens):
            rows[at : at + len(some)] = some.to(rows.device)
        return rows

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        return self._model.embed(torch.tensor(list(tokens), device=self._model.device))


def _given(rows: Tensor) -> Tensor:
    """A copy of the rows on the host, which is not a tensor of inference mode."""
    return torch.empty_like(rows, device="cpu").copy_(rows)
