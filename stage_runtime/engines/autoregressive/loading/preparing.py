"""Faster parts in the place of a model's, on a CPU, and in the log which of them compute it. Called by `loader`."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.kernels import fusing, linears, loop_cache
from stage_runtime.engines.autoregressive.loading import compiling
from stage_runtime.engines.autoregressive.model.models import PagedModel

log = logging.getLogger(__name__)


def prepare(spec: Autoregressive, paged: PagedModel, *, loops: bool) -> dict[linears.LinearsBackend, int]:
    """loops: parts may be compiled loops. Returns: how many linear layers have which form."""
    model, kept = paged.model, loop_cache.folder()
    wanted = cast(Any, spec.linears)
    with torch.inference_mode():
        if not loops:
            used, joined = linears.pack(model, wanted, loops=False, kept=kept), 0
            why = "torch computes attention"
        else:
            from stage_runtime.engines.autoregressive.kernels import decoder_layers, decoder_pass

            fused = fusing.fuse(model)
            log.info("fused layers: %s", ", ".join(f"{count} {name}" for name, count in fused.items()) or "none")
            program = decoder_layers.products(model)
            used = linears.pack(model, wanted, program=program, kept=kept)
            joined = decoder_layers.join(model)
            if (shorter := decoder_pass.of(model)) is not None:
                paged.shorter = shorter.run
            why = _why_apart(spec, paged, bool(program))
    log.info("linear layers: %s", ", ".join(f"{count} {form}" for form, count in used.items()))
    if joined:
        log.info("all %d layers are one program of compiled loops%s", joined, ", not torch's" if spec.compile else "")
        return used
    log.info("layers are computed one by one: %s", why)
    if spec.compile:
        log.info("parts of layers that torch compiles: %d", compiling.compile_parts(model).count)
    return used


def _why_apart(spec: Autoregressive, paged: PagedModel, could: bool) -> str:
    """Why layers that compiled loops compute are not one program. could: their sizes and classes fit."""
    if could:
        return "products of other forms are faster" if spec.linears == "auto" else f"linears={spec.linears!r}"
    if paged.dtype is not torch.float32:
        kind = str(paged.dtype).removeprefix("torch.")
        return f"a program computes float32, and bfloat16 where there is avx512_bf16; this is {kind}"
    return f"no program for the layers of {type(paged.model).__name__}, or for their sizes"
