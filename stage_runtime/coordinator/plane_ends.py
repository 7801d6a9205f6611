"""The coordinator's ends of the control plane and of the data plane, and the loop that both run on."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from stage_runtime.relays.dispatch import Relays
from stage_runtime.sockets.channels import Channels


class PlaneEnds(NamedTuple):
    """Made by the process, shared by the coordinator's parts."""

    channels: Channels
    relays: Relays
    loop: asyncio.AbstractEventLoop
