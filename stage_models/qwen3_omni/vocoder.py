"""Qwen3-Omni's code2wav by pieces: frames of codes to samples, the same as of one whole decode whatever the pieces.

The network is causal. Each request keeps what its layers need of earlier frames: keys and values of the attention
window, the last inputs of each convolution, the last input of each transposed one. So nothing is computed twice, no
sample is dropped between pieces, and n frames give n * 1920 - 555 samples as the whole decode does (the numbers are
those of the published config). Chunks of several requests are computed as one batch where they have equal lengths.
Called by `stages.code2wav` on the stage's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class State:
    """The values that one request's layers keep. Made by `Vocoder.begin`, changed by `Vocoder.decode`."""

    def __init__(self) -> None:
        self.frames = 0  #: Decoded so far.
        self.samples = 0  #: Given out so far.
        self.keys: list[Tensor] = []  #: Keys of each attention layer, ``[heads, window - 1, dim]``; the newest last.
        self.values: list[Tensor] = []
        self.tails: list[Tensor] = []  #: Inputs of each convolution, in order: its last ones, ``[channels, n]``.

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (*self.keys, *self.values, *self.tails))


class Vocoder:
    """A code2wav module of transformers, called with pieces."""

    def __init__(self, model: Any) -> None:
        """model: `Qwen3OmniMoeCode2Wav`, in evaluation mode."""
        self._model = model
        self._config = model.config
        self.groups = int(self._config.num_quantizers)  #: Codes of a frame.
        self.codebook = int(self._config.codebook_size)
        self.upsample = int(model.total_upsample)  #: Samples of a frame.
        self._window = int(self._config.sliding_window)
        self._device = next(model.parameters()).device
        #: Requests are batched on a GPU. Each is computed alone on a CPU, so that its samples do not depend on others.
        self.batched = self._device.type != "cpu"

    def begin(self) -> State:
        return State()

    @torch.no_grad()
    def decode(self, pieces: Sequence[tuple[State, Tensor]]) -> list[Tensor]:
        """The next samples of each request, f32 ``[n]`` in -1 … 1 on the CPU.

        pieces: a request's state, and its next frames ``[frames, groups]`` of whole numbers below `codebook`.
        """
        found: dict[int, Tensor] = {}
        groups: dict[tuple[int, bool], list[int]] = {}
        for at, (state, frames) in enumerate(pieces):
            if len(frames):
                key = (len(frames), state.frames == 0) if self.batched else (at, True)
                groups.setdefault(key, []).append(at)
        for chosen in groups.values():
            states = [pieces[at][0] for at in chosen]
            waves = self._decode(states, torch.stack([pieces[at][1] for at in chosen]).to(self._device))
            for at, state, wave in zip(chosen, states, waves, strict=True):
                state.samples += len(wave)
                found[at] = wave
        return [found.get(at, torch.empty(0)) for at in range(len(pieces))]

    def _decode(self, states: Sequence[State], frames: Tensor) -> Tensor:
        """frames: ``[requests, frames, groups]``; all of the states are new, or none. Returns: ``[requests, n]``."""
        codes = frames.transpose(1, 2).long()
        hidden = self._model.code_embedding(codes + self._model.code_offset).mean(1)
        hidden = self._attend(states, hidden).permute(0, 2, 1)
        step = _Convolutions(states, first=states[0].frames == 0)
        for transposed, block in self._model.upsample:
            hidden = self._next(block, step.transposed(transposed, hidden), step)
        for layer in self._model.decoder:
            hidden = self._layer(layer, hidden, step)
        step.keep()
        for state in states:
            state.frames += frames.shape[1]
        return hidden[:, 0].clamp(-1, 1).float().to("cpu")

    # --- attention ------------------------------------------------------------------------------------------------

    def _attend(self, states: Sequence[State], hidden: Tensor) -> Tensor:
        """The transformer before the convolutions. hidden: ``[requests, frames, H]``."""
        model = self._model.pre_transformer
        count = hidden.shape[1]
        past = torch.tensor([state.frames for state in states], device=hidden.device)
        positions = past[:, None] + torch.arange(count, device=hidden.device)
        rotary = model.rotary_emb(hidden, positions)
        mask = self._mask(past, count)
        for index, layer in enumerate(model.layers):
            normed = layer.input_layernorm(hidden)
            hidden = hidden + layer.self_attn_layer_scale(
                self._attention(layer.self_attn, index, states, normed, rotary, mask)
            )
            hidden = hidden + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(hidden)))
        normed_all: Tensor = model.norm(hidden)
        return normed_all

    def _mask(self, past: Tensor, count: int) -> Tensor:
        """The mask of each query, ``[requests, 1, count, window - 1 + count]``: of kept keys the newest stand last."""
        kept = self._window - 1
        query = torch.arange(count, device=past.device)[:, None] + kept
        key = torch.arange(kept + count, device=past.device)[None, :]
        near = (key <= query) & (key > query - self._window)
        there = key[None] >= kept - past.clamp(max=kept)[:, None, None]
        return (near[None] & there)[:, None]

    def _attention(
        self, module: Any, index: int, states: Sequence[State], hidden: Tensor, rotary: Any, mask: Tensor
    ) -> Tensor:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import apply_rotary_pos_emb

        shape = (*hidden.shape[:-1], -1, module.head_dim)
        query, key, value = (
            one(hidden).view(shape).transpose(1, 2) for one in (module.q_proj, module.k_proj, module.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        key, value = self._kept(index, states, key, value)
        repeats = module.num_key_value_groups
        if repeats > 1:
            key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=module.scaling)
        projected: Tensor = module.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _kept(self, index: int, states: Sequence[State], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Earlier keys and values before the new ones; the newest of all are kept."""
        kept = self._window - 1
        joined = []
        for name, new in (("keys", key), ("values", value)):
            blank = new.new_zeros(new.shape[1], kept, new.shape[3])
            before = torch.stack([(getattr(one, name)[index : index + 1] or [blank])[0] for one in states])
            both = torch.cat([before, new], dim=2)
            for state, one in zip(states, both, strict=True):
                getattr(state, name)[index : index + 1] = [one[:, -kept:].clone()]
            joined.append(both)
        return joined[0], joined[1]

    # --- convolutions ---------------------------------------------------------------------------------------------

    def _layer(self, layer: Any, hidden: Tensor, step: _Convolutions) -> Tensor:
        """A layer of the decoder: a block, an activation or a convolution."""
        if hasattr(layer, "block"):
            for inner in layer.block:
                hidden = self._layer(inner, hidden, step)
            return hidden
        if hasattr(layer, "left_pad"):
            return step.transposed(layer, hidden)
        if hasattr(layer, "dilation"):
            return step.causal(layer, hidden)
        if hasattr(layer, "conv1"):
            inside = step.causal(layer.conv1, layer.act1(hidden))
            return step.causal(layer.conv2, layer.act2(inside)) + hidden
        activated: Tensor = layer(hidden)
        return activated

    def _next(self, block: Any, hidden: Tensor, step: _Convolutions) -> Tensor:
        """A ConvNeXt block; its convolution looks back."""
        inside = step.causal(block.dwconv, hidden).permute(0, 2, 1)
        inside = block.pwconv2(block.act(block.pwconv1(block.norm(inside))))
        joined: Tensor = hidden + (block.gamma * inside).permute(0, 2, 1)
        return joined


class _Convolutions:
    """One pass over all convolutions of a decode, in order: each continues from its tail of the pass before."""

    def __init__(self, states: Sequence[State], *, first: bool) -> None:
        self._states = states
        self._first = first
        self._at = 0
        self._tails: list[Tensor] = []  #: Tails of this pass, ``[requests, channels, n]``.

    def causal(self, layer: Any, hidden: Tensor) -> Tensor:
        """The same as `CausalConvNet` with stride 1: as many outputs as inputs."""
        before = self._before(hidden, layer.padding)
        joined = hidden if before is None else torch.cat([before, hidden], dim=2)
        self._tails.append(joined[..., joined.shape[2] - layer.padding :])
        out: Tensor = layer.conv(joined)
        return out

    def transposed(self, layer: Any, hidden: Tensor) -> Tensor:
        """The same as `CausalTransConvNet`. An output needs its input and the one before: the first gives none."""
        stride = layer.conv.stride[0]
        if layer.left_pad == 0:
            out: Tensor = layer.conv(hidden)
            return out
        if layer.left_pad != stride:
            raise ValueError(f"a transposed convolution with kernel {stride + layer.left_pad} and stride {stride}")
        joined = hidden if self._first else torch.cat([self._stacked(), hidden], dim=2)
        self._tails.append(joined[..., -1:])
        full: Tensor = layer.conv(joined)
        return full[..., stride : joined.shape[2] * stride]

    def _before(self, hidden: Tensor, count: int) -> Tensor | None:
        if count == 0:
            self._at += not self._first
            return None
        return hidden.new_zeros(*hidden.shape[:2], count) if self._first else self._stacked()

    def _stacked(self) -> Tensor:
        found = torch.stack([state.tails[self._at] for state in self._states])
        self._at += 1
        return found

    def keep(self) -> None:
        for index, state in enumerate(self._states):
            state.tails = [one[index].clone() for one in self._tails]
