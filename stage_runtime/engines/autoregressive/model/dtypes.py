"""The dtype a model is computed in: bfloat16 only where the processor has instructions for it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

from stage_runtime.errors import ConfigurationError

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
#: Flags in /proc/cpuinfo of processors that multiply bfloat16: x86's and ARM's.
BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@functools.cache
def flags() -> frozenset[str]:
    """The flags of this machine's processor; empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def chosen(dtype: str, device: str, processor: frozenset[str] | None = None) -> str:
    """The dtype by torch's name. ``auto``: bfloat16 where it is computed by instructions of its own, else float32.

    processor: its flags; None: this machine's.
    Raises: ConfigurationError: bfloat16 is asked for, and this processor would emulate it, slower than float32.
    """
    if device != "cpu":
        return "bfloat16" if dtype == "auto" else dtype
    able = bool(BF16_FLAGS & (flags() if processor is None else processor))
    if dtype == "auto":
        return "bfloat16" if able else "float32"
    if dtype == "bfloat16" and not able:
        raise ConfigurationError(
            "omni.Autoregressive(dtype='bfloat16'): this processor has no instructions for it (avx512_bf16, amx_bf16; "
            "on ARM bf16), so it would be slower than float32: dtype='auto' takes float32 here"
        )
    return dtype
