"""The relays that a pipeline can name, and what each of them needs.

Here: facts that validation and planning share. Not here: how a relay works (the runtime's `relays/`), or whether it
starts on a machine, which only the running processes know.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RelayBackend = Literal["auto", "shm", "tcp", "nccl", "nixl", "mooncake", "cuda_ipc"]


class RelayTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities of one relay."""

    one_pod: bool = False  #: It never crosses pods.
    by_rdma: bool = False  #: It uses RDMA devices where there are some.
    of_gpus: bool = False  #: Both ends need a GPU.
    #: The medium that carries its bytes between pods without RDMA, or within one. The operator gives every pipeline a
    #: key, so the one relay that can encrypt does.
    medium: Literal["memory", "gpu", "tcp", "tcp+curve"] = "tcp"


RELAYS: dict[str, RelayTraits] = {
    "shm": RelayTraits(one_pod=True, medium="memory"),
    "tcp": RelayTraits(medium="tcp+curve"),
    "nccl": RelayTraits(by_rdma=True),
    "nixl": RelayTraits(by_rdma=True),
    "mooncake": RelayTraits(by_rdma=True),
    "cuda_ipc": RelayTraits(one_pod=True, of_gpus=True, medium="gpu"),
}
