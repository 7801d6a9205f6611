"""The table of relays that tests open. It imports no torch: the far ends of relays that need none start quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stage_runtime.relays.registry import RELAYS, RelayEntry

#: The relays, with cuda_ipc as a machine without a GPU can run it, where it is asked for.
TABLE: Final[Mapping[str, RelayEntry]] = {
    **RELAYS,
    "cuda_ipc": RelayEntry(factory="tests.relays.stand_in_gpu:StandInRelay", auto=False, sends_from_gpus=True),
}
