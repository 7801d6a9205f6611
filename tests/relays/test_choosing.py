"""The rules of the choice, as a table; no process and no relay runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import RelayRefused
from stage_runtime.relays.base import Peer
from stage_runtime.relays.choice import choosing, devices
from stage_runtime.relays.choice.choices import Choices
from stage_runtime.relays.choice.choosing import ProcessFacts, Reached, RelayChoice
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS

ONLY_SHM = {"shm": RELAYS["shm"]}
STARTED = ("shm", "nixl", "mooncake", "tcp")
HERE = ProcessFacts(incarnation="here", pod="1", boot="b", namespaces={"pid": 1, "net": 2}, started=STARTED)
THERE = msgspec.structs.replace(HERE, incarnation="there", pod="2", namespaces={"pid": 3, "net": 4})
COORDINATOR = msgspec.structs.replace(THERE, coordinator=True)

SHM = Reached(relay="shm", medium="memory")
NIXL = Reached(relay="nixl", medium="tcp", needs="rdma")
NIXL_RDMA = Reached(relay="nixl", medium="rdma", needs="rdma")
MOONCAKE = Reached(relay="mooncake", medium="tcp", needs="rdma")
TCP = Reached(relay="tcp", medium="tcp")
UNIX = Reached(relay="tcp", medium="unix")
CURVE = Reached(relay="tcp", medium="tcp+curve")


def broken(reached: Reached) -> Reached:
    return msgspec.structs.replace(reached, failed="it broke")


@pytest.mark.proves("relay-named")
@pytest.mark.parametrize(
    ("wanted", "reached", "options", "choice"),
    [
        ("auto", [SHM, TCP], {}, ("shm", "memory", None)),
        ("auto", [TCP], {}, ("tcp", "tcp", None)),
        ("auto", [NIXL_RDMA, TCP], {}, ("nixl", "rdma", None)),
        ("auto", [NIXL, MOONCAKE, TCP], {}, ("tcp", "tcp", None)),
        ("auto", [NIXL_RDMA, TCP], {"allow_tcp": False}, ("nixl", "rdma", None)),
        ("auto", [UNIX], {"allow_tcp": False}, ("tcp", "unix", None)),
        ("auto", [CURVE], {}, ("tcp", "tcp+curve", None)),
        ("nixl", [SHM, NIXL, TCP], {}, ("nixl", "tcp", None)),
        ("tcp", [SHM, NIXL, TCP], {}, ("tcp", "tcp", None)),
        ("shm", [TCP], {"peer": COORDINATOR}, ("tcp", "tcp", None)),
        ("auto", [TCP], {"peer": COORDINATOR, "allow_tcp": False}, ("tcp", "tcp", None)),
        ("nixl", [broken(NIXL), MOONCAKE, TCP], {}, ("tcp", "tcp", "nixl")),
        ("nixl", [SHM, broken(NIXL), TCP], {}, ("shm", "memory", "nixl")),
        ("auto", [broken(SHM), TCP], {}, ("tcp", "tcp", "shm")),
    ],
)
def test_the_first_that_reaches_the_peer_and_is_allowed_is_used(
    wanted: str, reached: list[Reached], options: dict[str, Any], choice: tuple[str, Any, str | None]
) -> None:
    relay, medium, instead_of = choice
    expected = RelayChoice(relay=relay, medium=medium, instead_of=instead_of)
    assert choosing.choose(wanted, reached, own=HERE, **{"peer": THERE, **options}) == expected


@pytest.mark.proves("relay-named")
@pytest.mark.parametrize(
    ("wanted", "reached", "options", "why"),
    [
        ("auto", [], {}, "no relay reaches there"),
        (
            "auto",
            [NIXL, TCP],
            {"allow_tcp": False},
            "no relay to there: nixl: it would use TCP, and dataPlane.allowTCP is false; "
            "tcp: it would use TCP, and dataPlane.allowTCP is false",
        ),
        (
            "nixl",
            [NIXL, TCP],
            {"allow_tcp": False},
            "relayBackend nixl to there: it would use TCP, and dataPlane.allowTCP is false",
        ),
        ("shm", [TCP], {}, "relayBackend shm does not reach there: it cannot connect the two (another pod)"),
        (
            "shm",
            [TCP],
            {"peer": msgspec.structs.replace(THERE, pod="1")},
            "relayBackend shm does not reach there: it cannot connect the two (another pid and net namespace)",
        ),
        (
            "mooncake",
            [TCP],
            {"peer": msgspec.structs.replace(THERE, started=("tcp",))},
            "relayBackend mooncake does not reach there: it is not open there",
        ),
        (
            "nixl",
            [TCP],
            {"peer": msgspec.structs.replace(THERE, started=("tcp",), refused={"nixl": "no UCX"})},
            "relayBackend nixl does not reach there: it did not start there (no UCX)",
        ),
        (
            "nixl",
            [broken(NIXL), TCP],
            {"allow_tcp": False},
            "relayBackend nixl to there: it failed (it broke)",
        ),
    ],
)
def test_a_refusal_names_the_reason(wanted: str, reached: list[Reached], options: dict[str, Any], why: str) -> None:
    with pytest.raises(RelayRefused) as refused:
        choosing.choose(wanted, reached, own=HERE, **{"peer": THERE, **options})
    assert str(refused.value) == why


LINES = st.builds(
    Reached,
    relay=st.sampled_from(STARTED),
    medium=st.sampled_from(["gpu", "memory", "rdma", "unix", "tcp", "tcp+curve"]),
    auto=st.booleans(),
    needs=st.sampled_from([None, "gpu", "rdma"]),
    failed=st.sampled_from([None, "broke"]),
)


@pytest.mark.proves("relay-named")
@given(
    st.lists(LINES, max_size=5, unique_by=lambda each: each.relay), st.sampled_from(["auto", *STARTED]), st.booleans()
)
def test_what_is_chosen_reaches_the_peer_has_not_failed_and_is_allowed(
    reached: list[Reached], wanted: str, allow_tcp: bool
) -> None:
    try:
        choice = choosing.choose(wanted, reached, own=HERE, peer=THERE, allow_tcp=allow_tcp)
    except RelayRefused as error:
        assert str(error)
        return
    chosen = next(each for each in reached if each.relay == choice.relay)
    assert chosen.failed is None
    assert allow_tcp or chosen.medium not in ("tcp", "tcp+curve")
    failed = {each.relay for each in reached if each.failed}
    assert wanted in ("auto", chosen.relay) or wanted in failed


@given(
    st.recursive(st.none() | st.booleans() | st.text() | st.integers(), lambda inner: st.dictionaries(st.text(), inner))
)
def test_facts_of_a_peer_are_read_or_count_as_not_announced(facts_of_process: Any) -> None:
    facts = choosing.process_facts({choosing.PROCESS: facts_of_process})
    assert isinstance(facts, ProcessFacts)


def test_facts_survive_the_wire() -> None:
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(HERE)))
    assert choosing.process_facts({choosing.PROCESS: received}) == HERE


def test_after_a_failure_the_next_relay_is_chosen_until_the_peer_is_forgotten() -> None:
    peer = Peer("there")
    choices = Choices(HERE)
    choices.open(peer, THERE, [SHM, NIXL, TCP])
    assert choices.choose(peer, "nixl").relay == "nixl"
    assert choices.fail(peer, "nixl", "no byte moved")
    assert choices.choose(peer, "nixl").relay == "shm"
    assert not choices.fail(peer, "nixl", "no byte moved")
    assert choices.fail(peer, "shm", "unmapped")
    assert choices.choose(peer, "nixl") == RelayChoice(relay="tcp", medium="tcp", instead_of="shm")
    choices.forget(peer)
    choices.open(peer, THERE, [SHM, NIXL, TCP])
    assert choices.choose(peer, "nixl").relay == "nixl"


@pytest.mark.proves("relay-fails")
def test_a_failure_is_counted_and_logged_once_and_not_for_a_peer_that_died(caplog: pytest.LogCaptureFixture) -> None:
    choices = Choices(HERE)
    for name in ("there", "dead"):
        choices.open(Peer(name), THERE, [NIXL, TCP])
        assert choices.fail(Peer(name), "nixl", "no byte moved")
    choices.forget(Peer("dead"))
    for name in ("there", "dead"):
        choices.count(Peer(name), "nixl", "no byte moved")
    assert choices.failovers == {"nixl": 1}
    assert [record.message for record in caplog.records] == [
        "relay nixl to there failed: no byte moved; using tcp",
    ]


def test_devices_are_read_from_the_kernel(tmp_path: Path) -> None:
    card = tmp_path / "gpus" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t NVIDIA H100\nGPU UUID: \t GPU-1234\nBus Location: 1\n")
    assert devices.gpus(tmp_path / "gpus", {}) == ("GPU-1234",)
    assert devices.gpus(tmp_path / "gpus", {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert devices.gpus(tmp_path / "none", {}) == ()
    assert set(devices.namespaces()) == {"pid", "ipc", "net", "mnt"} and devices.boot_id()


def test_an_rdma_device_counts_only_where_its_node_can_be_opened(tmp_path: Path) -> None:
    """``/sys`` shows a pod all devices of its node; ``/dev/infiniband`` has those that it was given."""
    verbs, nodes = tmp_path / "infiniband_verbs", tmp_path / "dev"
    nodes.mkdir()
    for number, name in enumerate(("mlx5_1", "mlx5_0", "mlx5_2")):
        (verbs / f"uverbs{number}").mkdir(parents=True)
        (verbs / f"uverbs{number}" / "ibdev").write_text(f"{name}\n")
    (verbs / "abi_version").write_text("6\n")
    assert devices.rdma_devices(verbs, nodes) == ()
    (nodes / "uverbs0").touch()
    (nodes / "uverbs1").touch()
    (nodes / "uverbs2").mkdir()  # cannot be opened for writing, by root neither
    assert devices.rdma_devices(verbs, nodes) == ("mlx5_0", "mlx5_1")
    assert devices.rdma_devices(tmp_path / "none", nodes) == ()


async def test_a_process_announces_the_rdma_devices_that_it_is_given() -> None:
    loop = asyncio.get_running_loop()
    for names in ((), ("mlx5_0",)):
        settings = RelaySettings(arena_bytes=1 << 20, prefault_bytes=0, rdma=names)
        relays = Relays(loop=loop, incarnation="x", on_release=lambda *_: None, settings=settings, table=ONLY_SHM)
        assert relays.process.rdma == names
        relays.close()
