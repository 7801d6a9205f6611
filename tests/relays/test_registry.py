"""The table of relays: a relay is one folder and one line, and what the line says happens."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

import omnipipeline_spec.types.relays as relays_of_the_contract
import stage_runtime.relays
from stage_runtime.errors import ConfigurationError, RelayRefused
from stage_runtime.payloads import encoding
from stage_runtime.relays import registry
from stage_runtime.relays.choice.choosing import PROCESS
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS, RelayEntry
from stage_runtime.relays.shm.relay import ShmRelay
from tests.relays.relay_pairs import PATIENCE_S, SMALL

HERE = Path(stage_runtime.relays.__file__).parent
SHARED = {"choice", "memory", "moving"}  # folders that all relays use


class ListedRelay(ShmRelay):
    """A relay that has a line and is not of `auto`."""

    name = "listed"


def listed(context: RelayContext) -> ListedRelay:
    return ListedRelay(context)


LISTED: Mapping[str, RelayEntry] = {"listed": RelayEntry(factory=f"{__name__}:listed", auto=False), **RELAYS}
AUTO = registry.to_open(())
MISSING = RelayEntry(factory="there_is_no_such_package:relay", extra="pigeon")


def relays(incarnation: str, table: Mapping[str, RelayEntry], *named: str) -> Relays:
    return Relays(
        loop=asyncio.get_running_loop(),
        incarnation=incarnation,
        on_release=lambda peer, transfer: None,
        settings=msgspec.structs.replace(SMALL, named=frozenset(named)),
        table=table,
    )


def test_every_folder_has_a_line_and_every_line_a_folder() -> None:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders - SHARED == set(RELAYS)
    for name, entry in RELAYS.items():
        assert entry.factory.startswith(f"stage_runtime.relays.{name}.")
        assert registry.load(name).name == name  # type: ignore[attr-defined]


def test_the_table_imports_no_relay_and_what_no_relay_needs() -> None:
    program = "import sys; import stage_runtime.relays.registry; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    found = done.stdout.split()
    assert not {"numpy", "torch", "zmq"}.intersection(found)
    assert [name for name in found if name.startswith("stage_runtime.relays.")] == ["stage_runtime.relays.registry"]


async def test_a_relay_that_is_listed_is_opened_and_used_where_a_pipeline_asks_for_it() -> None:
    a, b = relays("a", LISTED, "listed"), relays("b", LISTED, "listed")
    try:
        assert list(a.facts()) == ["listed", *AUTO, PROCESS]
        assert a.open("b", b.facts()) == ("listed", *AUTO) == b.open("a", a.facts())
        assert (a.choose("b", "listed"), a.choose("b")) == ("listed", AUTO[0])
        put = a.put(encoding.extract(np.ones(9000)), request_id="r", peer="b", backend="listed")
        assert put is not None and put.metadata.startswith(b"listed:")
        assert len(await b.get(put.metadata, request_id="r", peer="a").wait_for_completion(PATIENCE_S)) == 72_000
    finally:
        a.close()
        b.close()


async def test_a_relay_that_nobody_asks_for_is_not_opened_and_refused_where_it_is_named() -> None:
    a, b = relays("a", LISTED, "listed"), relays("b", LISTED)
    try:
        assert list(b.facts()) == [*AUTO, PROCESS]
        assert a.open("b", b.facts()) == AUTO
        assert a.choose("b") == AUTO[0]
        with pytest.raises(RelayRefused, match="relayBackend listed does not reach b: it is not open there"):
            a.choose("b", "listed")
    finally:
        a.close()
        b.close()


async def test_auto_does_without_what_is_not_installed_and_says_how_to_install_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    only = relays("a", {"pigeon": MISSING, **RELAYS})
    assert list(only.facts()) == [*AUTO, PROCESS]
    assert list(only.process.refused) == ["pigeon"]
    only.close()
    assert "relay 'pigeon' cannot be loaded" in caplog.text and "omnipipeline[pigeon]" in caplog.text


async def test_what_a_pipeline_asks_for_and_is_not_installed_ends_the_start() -> None:
    with pytest.raises(ConfigurationError, match=r"No module named 'there_is_no.*pip install 'omnipipeline\[pigeon\]'"):
        relays("a", {"pigeon": MISSING, **RELAYS}, "pigeon")


async def test_a_relay_that_is_not_in_the_table_ends_the_start_with_those_that_are() -> None:
    wanted = f"'carrier-pigeon' is not in this version: use auto, {' or '.join(RELAYS)}"
    with pytest.raises(ConfigurationError, match=wanted):
        registry.load("carrier-pigeon")
    with pytest.raises(ConfigurationError, match=wanted):
        relays("a", RELAYS, "carrier-pigeon")


def test_auto_opens_what_needs_a_device_only_where_the_machine_has_it() -> None:
    always = ("shm", "tcp")
    assert [name for name in registry.to_open(()) if name in ("shm", "nixl", "mooncake", "tcp")] == list(always)
    with_rdma = registry.to_open((), has=lambda need: need == "rdma")
    assert {"nixl", "mooncake"} <= set(with_rdma)


def test_the_contract_names_the_relays_that_the_table_has() -> None:
    names = set(get_args(relays_of_the_contract.RelayBackend)) - {"auto"}
    assert names == set(RELAYS) == set(relays_of_the_contract.RELAYS)
