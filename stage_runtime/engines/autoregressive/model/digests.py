"""Digests that tell one model's keys and values from another's."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import torch

SAMPLED: Final = 64  # values of each tensor that go into the digest


def weights_digest(model: Any) -> str:
    """A digest of a transformers model as it was loaded: its configuration, and values of each of its weights.

    They are taken all over a tensor: a model that was trained further differs in some of them. It is called before
    anything is packed for this machine, or cut for a tensor-parallel rank.
    """
    digest = blake2b(model.config.to_json_string(use_diff=False).encode(), digest_size=8)
    for _name, one in sorted(model.named_parameters()):
        values = one.detach().flatten()
        some = values[:: max(len(values) // SAMPLED, 1)][:SAMPLED]
        digest.update(some.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()
