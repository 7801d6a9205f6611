"""Adapters in passes: what each adds to the outputs of the layers that it has, for the tokens of its requests.

Hooks stand on the layers for the time of a pass that has tokens of adapters: any other pass is computed as by a model
without adapters, by its compiled loops and parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from stage_runtime.engines.autoregressive.lora import checkpoints, compiled
from stage_runtime.engines.autoregressive.lora.checkpoints import Factors
from stage_runtime.engines.autoregressive.lora.sites import Site
from stage_runtime.engines.autoregressive.model import adapted
from stage_runtime.engines.autoregressive.model.adapted import AdapterFacts, AdapterRead, AdapterTokens
from stage_runtime.engines.autoregressive.model.models import UnsupportedModel


class _Piece(NamedTuple):
    """A layer's part of a module. b: ``[outputs, rank]``. ranks: its place in what ``a`` gives."""

    first: int
    size: int
    ranks: slice
    b: Tensor
    scale: float


class AddedOutputs(Protocol):
    """An adapter's part at one module."""

    @property
    def nbytes(self) -> int: ...

    def add(self, rows: Tensor, out: Tensor, places: Tensor | None) -> None:
        """Add to ``out`` ``[tokens, outputs]`` what the adapter gives for ``rows`` ``[tokens, inputs]``.

        places: of the adapter's tokens; None: all are.
        """


class _Added(NamedTuple):
    """The same by torch's operators. a: ``[ranks of all pieces, inputs]``."""

    a: Tensor
    pieces: Sequence[_Piece]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(piece.b.nbytes for piece in self.pieces)

    def add(self, rows: Tensor, out: Tensor, places: Tensor | None) -> None:
        inner = functional.linear(rows if places is None else rows.index_select(0, places), self.a)
        for piece in self.pieces:
            target = out.narrow(1, piece.first, piece.size)
            if places is None:
                target.addmm_(inner[:, piece.ranks], piece.b.T, alpha=piece.scale)
            else:
                given_rows = functional.linear(inner[:, piece.ranks], piece.b)
                target.index_add_(0, places, given_rows, alpha=piece.scale)


class _Loaded(NamedTuple):
    added: Mapping[nn.Module, AddedOutputs]
    nbytes: int


class LoRALayers:
    """`adapted.AdapterLayers` of one model, or of one rank's share. Not for two threads at once, but for `read`."""

    def __init__(
        self,
        sites: Mapping[str, Site],
        shapes: Mapping[str, tuple[int, int]],
        *,
        most_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
        loops: bool = False,
    ) -> None:
        """shapes: inputs and outputs of the whole layers. most_rank: of an adapter. rank: this one of ``ranks``. loops:
        compiled ones compute adapters where they can.
        """
        self._sites, self._shapes = sites, shapes
        self._most_rank = most_rank
        self._dtype, self._device = dtype, device
        self._rank, self._ranks = rank, ranks
        self._scratch = compiled.Scratch() if loops and compiled.usable(device, dtype) else None
        self._loaded: dict[int, _Loaded] = {}

    @property
    def most_nbytes(self) -> int:
        """The bytes of the largest adapter."""
        values = sum(site.inputs + site.size for site in self._sites.values())
        return values * self._most_rank * self._dtype.itemsize

    def read(self, path: str) -> AdapterRead:
        found = checkpoints.read(path, self._shapes, self._most_rank)
        placed = self._placed(found.factors)
        return AdapterRead(AdapterFacts(found.digest, placed.nbytes), placed)

    def keep(self, number: int, read: AdapterRead) -> None:
        self._loaded[number] = read.weights

    def drop(self, number: int) -> None:
        self._loaded.pop(number, None)

    def _placed(self, factors: Mapping[str, Factors]) -> _Loaded:
        by_module: dict[nn.Module, list[tuple[Site, Factors]]] = {}
        for path, one in factors.items():
            site = self._sites[path]
            by_module.setdefault(site.module, []).append((site, self._share(site, one)))
        added = {module: self._added(parts) for module, parts in by_module.items()}
        return _Loaded(added, sum(one.nbytes for one in added.values()))

    def _added(self, parts: Sequence[tuple[Site, Factors]]) -> AddedOutputs:
        if self._scratch is None:
            return _joined(parts)
        return compiled.CompiledAdded([(site.first, factors) for site, factors in parts], self._scratch)

    def _share(self, site: Site, factors: Factors) -> Factors:
        """This rank's part, on the device."""
        a, b = factors.a, factors.b
        if site.share == "inputs":
            a = a.chunk(self._ranks, 1)[self._rank]
        if site.share == "outputs":
            b = b.chunk(self._ranks, 0)[self._rank]
        where: dict[str, Any] = {"device": self._device, "dtype": self._dtype, "copy": True}
        return Factors(a.to(**where).contiguous(), b.to(**where).contiguous(), factors.scale)

    @contextlib.contextmanager
    def applied(self, tokens: AdapterTokens, count: int) -> Iterator[None]:
        token = object()
        at: dict[nn.Module, list[tuple[AddedOutputs, Tensor | None]]] = {}
        for number, places in tokens:
            for module, added in self._loaded[number].added.items():
                at.setdefault(module, []).append((added, places))
        hooks = [module.register_forward_hook(_hook(token, parts, count)) for module, parts in at.items()]
        try:
            with adapted.within(token):
                yield
        finally:
            for one in hooks:
                one.remove()


def _joined(parts: Sequence[tuple[Site, Factors]]) -> _Added:
    pieces, at = [], 0
    for site, one in parts:
        rank = one.a.shape[0]
        pieces.append(_Piece(site.first, site.size, slice(at, at + rank), one.b, one.scale))
        at += rank
    return _Added(torch.cat([one.a for _site, one in parts]), pieces)


def _hook(
    token: object, parts: Sequence[tuple[AddedOutputs, Tensor | None]], count: int
) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
    """Adds to a module's output, within the pass ``token``: other threads may compute by the same module."""

    def after(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if adapted.current() is not token:
            return None
        inputs: Tensor = given[0]
        rows = inputs.reshape(-1, inputs.shape[-1])
        if len(rows) != count:
            kind = type(module).__name__
            raise UnsupportedModel(f"a {kind} with an adapter was given {len(rows)} of the {count} tokens of a step")
        whole = output.contiguous()
        out = whole.view(-1, output.shape[-1])
        for added, places in parts:
            added.add(rows, out, places)
        return whole

    return after
