"""A short run of `benchmarks/faults.py`: each fault at some members, judged by a client's ledger and by /proc."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faultlab import experiments, graph, network
from benchmarks.faultlab.experiments import Outcome
from benchmarks.faultlab.ledger import Entry, Ledger

needs_namespaces = pytest.mark.skipif(not network.possible(), reason="needs root, to make network namespaces")


@pytest.fixture
def base() -> Iterator[Path]:
    """A short folder, for sockets; its log is shown on failure."""
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        yield Path(folder)
        log = Path(folder) / "log"
        if log.exists():
            print(log.read_text()[-12_000:])


def judge(outcome: Outcome) -> None:
    """What holds whatever is hurt."""
    assert outcome.faults == [], "a request was lost, torn, ended twice, or got another's content"
    assert outcome.left == [], "something of the faulty time is still held"
    assert outcome.seconds_to_healthy < experiments.SERVES_WITHIN_S
    assert set(outcome.failed) <= {"unavailable", "transport_failed"}, "other codes blame the request"
    if outcome.replicas > 1:
        assert outcome.unstreamed_failed == 0, "the other replica could have served it"


async def test_a_kill_of_any_member_costs_no_unstreamed_request_that_another_replica_can_serve(base: Path) -> None:
    async with experiments.local(2, base) as pipeline:
        await experiments.warm(pipeline)
        for member in graph.MEMBERS:
            outcome = await experiments.hurt(pipeline, "SIGKILL", member, replicas=2, after_s=2.0)
            judge(outcome)
            assert outcome.retried + sum(outcome.failed.values()) > 0, "the kill must have hit requests"


async def test_the_only_instance_s_death_is_over_within_five_seconds(base: Path) -> None:
    async with experiments.local(1, base) as pipeline:
        await experiments.warm(pipeline)
        for member in ("fan-in", "terminal"):
            judge(await experiments.hurt(pipeline, "SIGKILL", member, replicas=1, after_s=4.0))


async def test_a_frozen_member_is_gone_around_and_comes_back(base: Path) -> None:
    async with experiments.local(2, base) as pipeline:
        await experiments.warm(pipeline)
        judge(await experiments.hurt(pipeline, "SIGSTOP", "consumer", replicas=2, after_s=3.0))


@pytest.mark.netns
@needs_namespaces
async def test_a_cut_network_heals_and_takes_nothing_along(base: Path) -> None:
    async with experiments.networked(2, base) as pipeline:
        await experiments.warm(pipeline)
        for member in ("producer", "fan-in"):
            judge(await experiments.hurt(pipeline, "cut", member, replicas=2, after_s=5.0))


async def test_scaling_up_and_down_under_load_loses_no_request_and_every_replica_serves(base: Path) -> None:
    async with experiments.local(1, base) as pipeline:
        await experiments.warm(pipeline)
        ledger, served = await experiments.resize(pipeline, "consumer", count=500, rate=50.0)
    assert ledger.faults() == [] and ledger.failed() == {}
    assert len(ledger.entries) == 500
    assert len(served) == 3 and min(served.values()) > 0, served


# --- the judge itself -------------------------------------------------------------------------------------------


def entry(**changes: object) -> Entry:
    fields = {"id": "r", "text": "a b", "stream": False, "sent_at": 10.0, "outcome": "completed", "ends": 1}
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
    for words, said in (["A", "C"], {}), (["A", "B"], {"hash": graph.answer_hash("a c")}):
        one = entry(stream=True, outcome="lost", ends=0)
        heard: list[str] = []
        for word in words:
            Ledger._event(one, heard, "chunk", {"data": word})
        Ledger._event(one, heard, "result", {"data": said})
        assert one.outcome == "wrong"


def test_healthy_is_when_the_last_failing_request_was_sent() -> None:
    ledger = Ledger("http://nowhere")
    ledger.entries = [entry(sent_at=12.0), entry(sent_at=14.5, outcome="unavailable"), entry(sent_at=15.0)]
    assert ledger.healthy_after(13.0) == 1.5
    assert ledger.healthy_after(20.0) == 0.0
