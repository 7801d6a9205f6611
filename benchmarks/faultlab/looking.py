"""A pipeline from outside: its gauges in /status and /metrics, and Linux's own of its processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

#: Gauges of a process that are 0 when nothing is under way.
AT_REST = (
    "relay_arena_bytes_in_use",
    "relay_slots_in_flight",
    "relay_shm_unreleased_transfers",
    "relay_shm_pinned_transfers",
    "relay_tcp_unreleased_transfers",
    "relay_tcp_pinned_transfers",
    "relay_tcp_unclaimed_bytes",
    "transfers_in_flight",
    "sends_queued",
)


class Held(msgspec.Struct, frozen=True):
    """The kernel's objects of one process, whoever it has links to."""

    descriptors: int  #: Descriptors beside those that links and relays need.
    threads: int


async def status(http: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get("/status")).json()
    return found


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Every sample by its name; of labelled ones ``name{value}``, by the last label."""
    text = (await http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        f"{sample.name}{{{list(sample.labels.values())[-1]}}}" if sample.labels else sample.name: sample.value
        for sample in samples
    }


async def under_way(http: httpx.AsyncClient) -> dict[str, float]:
    """Everything that is not at rest; empty when all is."""
    current = await status(http)
    found: dict[str, float] = {name: current[name] for name in ("in_flight", "awaiting_instance") if current[name]}
    for one in current["instances"]:
        numbers = {"waiting": one["waiting"], "running": one["running"], "bound": one["bound"], **one["gauges"]}
        for name in ("waiting", "running", "bound", *AT_REST):
            if numbers.get(name):
                found[f"{one['group']}.{name}"] = numbers[name]
    own = {**current["gauges"], "retained_body_bytes": (await metrics(http))["omnipipeline_retained_body_bytes"]}
    for name in ("retained_body_bytes", *AT_REST):
        if own.get(name):
            found[f"coordinator.{name}"] = own[name]
    return found


def held(pids: Mapping[str, int]) -> dict[str, Held]:
    """The holdings of each process, by its name."""
    return {name: Held(len(_descriptors(pid)[0]), len(os.listdir(f"/proc/{pid}/task"))) for name, pid in pids.items()}


def linked(pids: Mapping[str, int]) -> int:
    """Sockets and arenas that all processes have open: links and relays are opened when two are bound together first,
    so the number differs with the pairs that requests have met.
    """
    return sum(len(_descriptors(pid)[1]) for pid in pids.values())


def _descriptors(pid: int) -> tuple[list[str], list[str]]:
    """The open descriptors of a process: what it always needs, and what links and relays need."""
    targets = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(entry.path))
    of_links = [one for one in targets if one.startswith(("socket:", "anon_inode:[eventfd]", "/dev/shm/", "/memfd:"))]
    return [one for one in targets if one not in of_links], of_links


def resident(pids: Mapping[str, int]) -> dict[str, int]:
    """Private memory of each process in bytes: the arena is shared, and given back only after a while."""
    found = {}
    for name, pid in pids.items():
        pages = [int(word) for word in Path(f"/proc/{pid}/statm").read_text().split()]
        found[name] = (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")
    return found
