"""The results of `linears.measure` on this machine, in files, so that an engine that starts again need not measure.

The folder is that of `loop_cache`. A file's name stands for all that the times depend on: shape and dtype, processor,
threads, torch, the code of the products. Times of a start on a busy machine are joined with those of the next one,
until they are settled. The forms are measured where a file cannot be read, or holds anything else than times; a file
that cannot be written is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

log = logging.getLogger(__name__)

_CODE = ("linears.py", "products.py", "tiles.py", "native.py")  # a change of these may change the times


class KeptTimes(msgspec.Struct, frozen=True):
    """times: by form, as of `linears.measure`. settled: another start need not measure again."""

    times: dict[str, list[float]]
    settled: bool


_DECODER = msgspec.json.Decoder(KeptTimes)


def path_of(kept: Path, *facts: object) -> Path:
    """The file of a product. facts: all that its times depend on beside this machine and this code."""
    machine = (_processor(), torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    name = "\0".join(map(str, (*facts, *machine))).encode()
    code = b"".join(Path(__file__).with_name(file).read_bytes() for file in _CODE)
    return kept / f"{hashlib.sha256(name + code).hexdigest()[:32]}.json"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in text.splitlines())
    return "|".join(
        value.strip() for name, _colon, value in lines if name.strip() in ("model name", "flags", "Features")
    )


def read(path: Path, forms: Sequence[str], count: int) -> KeptTimes | None:
    """The times of some of ``forms``, ``count`` of each. None: the file is missing, or holds something else."""
    try:
        with path.open("rb") as file:
            owner, found = os.fstat(file.fileno()).st_uid, _DECODER.decode(file.read(1 << 16))
    except (OSError, msgspec.MsgspecError):
        return None
    sound = all(
        form in forms and len(times) == count and all(0 <= one < math.inf for one in times)
        for form, times in found.times.items()
    )
    return found if found.times and sound and owner in (0, os.geteuid()) else None


def write(path: Path, times: KeptTimes) -> None:
    """A file appears whole or not at all."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes(msgspec.json.encode(times))
        made.replace(path)
    except OSError as error:
        log.debug("the times of linear layers are not kept: %s", error)
        with contextlib.suppress(OSError):
            made.unlink()
