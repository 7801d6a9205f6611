"""What tells one model's keys and values from another's."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import torch

SAMPLED: Final = 64  # values of each vector that go into the digest


def weights_digest(model: Any) -> str:
    """A digest of a transformers model: its configuration, and the first values of its vectors (norms, biases).

    Those are as they were loaded, also where matrices have been packed for this machine. A model that was cut for a
    tensor-parallel rank has other vectors.
    """
    digest = blake2b(model.config.to_json_string(use_diff=False).encode(), digest_size=8)
    for _name, one in sorted(model.named_parameters()):
        if one.ndim == 1:
            digest.update(one.detach()[:SAMPLED].to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()
