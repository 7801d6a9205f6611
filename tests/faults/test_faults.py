"""A short run of `benchmarks/faults.py`: each fault at some members, judged by a client's ledger and by /proc."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faultlab import experiments, graph, looking, network
from benchmarks.faultlab.experiments import Outcome
from benchmarks.faultlab.ledger import Entry, Ledger
from stage_runtime.wire.messages import Beat
from tests.sockets.peers import End, ends, hello
from tests.thoroughness import rows

PATIENCE_S = 300  # per test, on a machine that does much else
#: The tests that want a network of their own must run in CI: without root or `ip` they fail there.
needs_namespaces = pytest.mark.skipif(
    not network.possible() and not os.environ.get("CI"), reason="needs root, to make network namespaces"
)


@pytest.fixture
def base() -> Iterator[Path]:
    """A short folder, for sockets; its log is shown on failure."""
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        yield Path(folder)
        log = Path(folder) / "log"
        if log.exists():
            print(log.read_text()[-12_000:])


def judge(outcome: Outcome) -> None:
    """Check the promises that hold whatever is hurt, however slow the machine; `broken` also asks how fast it ended."""
    assert outcome.requests > 0
    assert outcome.broken(healthy_within_s=None) == []


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
async def test_a_kill_of_any_member_costs_no_unstreamed_request_that_another_replica_can_serve(base: Path) -> None:
    async with experiments.local(2, base) as pipeline:
        hit = 0
        for member in graph.MEMBERS:
            await experiments.warm(pipeline)  # also those that were started for the ones killed before
            outcome = await experiments.hurt(pipeline, "SIGKILL", member, replicas=2, before_s=0.5, after_s=0.5)
            judge(outcome)
            hit += outcome.retried + sum(outcome.failed.values())
        # Not each: nothing is bound to a peer whose connection broke, and a fast member may have had nothing.
        assert hit > 0, "the kills must have hit requests"


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.nightly  # tests/processes/test_local.py has it each time, without measuring
async def test_the_only_instance_of_a_group_comes_back_and_serves(base: Path) -> None:
    async with experiments.local(1, base) as pipeline:
        await experiments.warm(pipeline)
        judge(await experiments.hurt(pipeline, "SIGKILL", "fan-in", replicas=1, after_s=1.0))
        await experiments.warm(pipeline)
        judge(await experiments.hurt(pipeline, "SIGSTOP", "consumer", replicas=1, after_s=1.0))
        await experiments.warm(pipeline)  # all of it is served


@pytest.mark.long
@pytest.mark.proves("instances-lose-each-other")
@pytest.mark.netns
@pytest.mark.debian("iproute2")
@pytest.mark.timeout(PATIENCE_S)
@needs_namespaces
async def test_a_cut_network_and_two_that_lose_each_other_cost_no_unstreamed_request(base: Path) -> None:
    async with experiments.networked(2, base) as pipeline:
        await experiments.warm(pipeline)
        judge(await experiments.hurt(pipeline, "cut", "producer", replicas=2, after_s=1.0))
        judge(await experiments.hurt(pipeline, "parted", "fan-in", replicas=2, after_s=1.0))
        await experiments.warm(pipeline)


@pytest.mark.proves("vanished-machine")
@pytest.mark.netns
@pytest.mark.debian("iproute2")
@pytest.mark.timeout(PATIENCE_S)
@needs_namespaces
@pytest.mark.parametrize(
    ("coordinator", "says"),
    rows([(False, "nothing"), (False, "beats"), (True, "beats"), (True, "nothing")], each_run=2),
    ids=lambda one: {False: "a neighbour", True: "a coordinator"}.get(one, one),
)
async def test_a_machine_that_vanishes_from_the_network_is_lost_in_time(coordinator: bool, says: str) -> None:
    """No FIN, no RST: every packet is dropped. Coordinators are checked by the kernel, others by heartbeats."""
    with contextlib.closing(network.Network()) as net:
        endpoint = f"tcp://{net.add('far')}:5550"
        echo = [sys.executable, "-m", "tests.sockets.echo_peer", "bb", endpoint, "plain"]
        inside = ("nsenter", f"--net=/run/netns/{net.space('far')}")
        program = await asyncio.create_subprocess_exec(*inside, *echo, stdout=asyncio.subprocess.PIPE)
        assert program.stdout is not None
        assert await program.stdout.readline()  # it listens: a peer that does not for 3 s would be lost before the cut
        end = End("aa", f"tcp://{network.SUBNET}.1:*", dead_after_s=3.0)
        try:
            async with ends(end):
                link = end.channels.connect("" if coordinator else "bb", endpoint)
                await end.listener.until(lambda: link.connected)
                link.send_unordered(hello(end))
                end.channels.name(endpoint, "bb")
                end.send("bb", "are you there")
                await end.listener.until(lambda: end.listener.received_words == ["are you there"])
                net.cut("far")
                turns = 0  # and not seconds: a busy machine takes longer for all of it
                while not end.listener.lost_peers:
                    if says == "beats":
                        end.channels.hint("bb", Beat({}, {}, {}))
                    await asyncio.sleep(0.2)
                    turns += 1
                    assert turns < 8 / 0.2, "only rare heartbeats find it, after 10 s"
                assert [peer for peer, _ in end.listener.lost_peers] == ["bb"]
        finally:
            program.kill()
            await program.wait()


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.nightly  # tests/processes/test_local.py has it each time
async def test_scaling_and_restarting_a_running_omni_up_loses_no_request(base: Path) -> None:
    """People's commands are used: 1 → 3 → 1 of a group in the middle and a new process of the entry."""
    file = base / "hurt.py"
    file.write_text("from benchmarks.faultlab import graph\n\npipeline = graph.spec()\n")
    async with running(file, base) as (url, omni):
        ledger = Ledger(url)
        load = asyncio.create_task(ledger.load(at_once=12))
        await ledger.sent(50)
        await omni("scale", "consumer", "3")
        await ledger.sent(len(ledger.entries) + 100)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            instances = (await looking.status(http))["instances"]
        await omni("restart", "entry")
        await omni("scale", "consumer", "1")
        await ledger.sent(len(ledger.entries) + 50)
        ledger.stop()
        await load
    assert ledger.faults() == []
    assert ledger.failed() == {}
    served = [one["bound_total"] for one in instances if one["group"] == "consumer"]
    assert len(served) == 3
    assert min(served) > 0


Omni = Callable[..., Awaitable[None]]


@contextlib.asynccontextmanager
async def running(file: Path, base: Path) -> AsyncIterator[tuple[str, Omni]]:
    """`omni up` of ``file``: its address, and how it is given orders."""
    program = (sys.executable, "-P", "-m", "stage_runtime")
    with (base / "log").open("wb") as log:
        options = ("--port", "0", "--set", f"endpoints.basePath={base}")
        up = await asyncio.create_subprocess_exec(*program, "up", "-f", str(file), *options, stdout=log, stderr=log)

        async def omni(*order: str) -> None:
            process = await asyncio.create_subprocess_exec(*program, *order, "--base-path", str(base), stdout=log)
            assert await process.wait() == 0

        try:
            while (found := re.search(r"answers at (http://\S+)", (base / "log").read_text())) is None:
                assert up.returncode is None
                await asyncio.sleep(0.05)
            yield found[1], omni
        finally:
            up.kill()
            await up.wait()


# --- the judge itself -------------------------------------------------------------------------------------------


def entry(**changes: object) -> Entry:
    fields: dict[str, Any] = {
        "id": "r",
        "text": "a b",
        "stream": False,
        "sent_at": 10.0,
        "outcome": "completed",
        "ends": 1,
    }
    return Entry(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"outcome": "lost", "ends": 0}, {"outcome": "torn"}, {"outcome": "wrong"}, {"ends": 2}, {"ends": 0}],
    ids=str,
)
def test_the_ledger_finds_what_may_never_happen(changes: dict[str, object]) -> None:
    """The positive control of `judge`."""
    ledger = Ledger("http://nowhere")
    ledger.entries = [entry(), entry(outcome="unavailable")]
    assert ledger.faults() == []
    ledger.entries.append(entry(**changes))
    assert len(ledger.faults()) == 1


def test_another_request_s_words_or_hash_are_seen() -> None:
    for words, data in (["A", "C"], {}), (["A", "B"], {"hash": graph.answer_hash("a c")}):
        one = entry(stream=True, outcome="lost", ends=0)
        words_received: list[str] = []
        for word in words:
            Ledger._event(one, words_received, "chunk", {"data": word})
        Ledger._event(one, words_received, "result", {"data": data})
        assert one.outcome == "wrong"


def test_healthy_is_when_the_last_failing_request_was_sent() -> None:
    ledger = Ledger("http://nowhere")
    ledger.entries = [entry(sent_at=12.0), entry(sent_at=14.5, outcome="unavailable"), entry(sent_at=15.0)]
    assert ledger.healthy_after(13.0) == 1.5
    assert ledger.healthy_after(20.0) == 0.0


def outcome(**changes: object) -> Outcome:
    fields: dict[str, Any] = {
        "fault": "SIGKILL", "target": "entry", "replicas": 2, "requests": 9, "retried": 1, "failed": {},
        "unstreamed_failed": 0, "lost": 0, "wrong": 0, "seconds_to_healthy": 1.0, "faults": [], "left": [],
    }  # fmt: skip
    return Outcome(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": ["r1: lost"]},
        {"left": ["entry: 9 descriptors now"]},
        {"seconds_to_healthy": 5.1},
        {"failed": {"unavailable": 2}, "unstreamed_failed": 1},
        {"failed": {"deadline": 1}},
        {"fault": "drain", "failed": {"unavailable": 1}},
        {"fault": "scale", "replicas": 1, "served": [5, 5]},
        {"fault": "scale", "replicas": 1, "served": [0, 5, 5]},
    ],
    ids=str,
)
def test_a_broken_promise_is_found(changes: dict[str, object]) -> None:
    assert outcome().broken() == []
    assert outcome(failed={"unavailable": 3}).broken() == [], "streams that had begun cannot be sent again"
    assert outcome(replicas=1, failed={"unavailable": 3}, unstreamed_failed=3).broken() == []
    assert outcome(fault="scale", replicas=1, served=[1, 2, 3]).broken() == []
    assert len(outcome(**changes).broken()) == 1
