"""Every number of a process's planes has a metric of the list, and the list has no metric without a number."""

from __future__ import annotations

import math

import pytest

from stage_runtime.metrics import catalog, planes
from stage_runtime.transfers.accounts import EdgeNumbers
from tests.relays.relay_pairs import Pair


def with_reason(name: str) -> str:
    return f"{name}.short" if "reason" in catalog.KV[name].labels else name


LORA = ["adapters", "adapter_bytes", "adapter_requests_total.org/sql.2"]


async def test_every_number_of_the_relays_has_a_metric_and_every_metric_of_relays_a_number() -> None:
    pair = Pair("shm")
    try:
        numbers = planes.gauges(
            relays=pair.a.stats(),
            transfers_in_flight=1,
            sends_queued=2,
            events={"resent": 3, "received": 4},
            edges={("thinker", "talker", "shm"): EdgeNumbers(5, 4, 0, 1, 0.5, 2)},
            edge_transports={("thinker", "talker", "shm", "memory"): 2},
            engines={
                "chat": dict.fromkeys(
                    [*catalog.ENGINE, *map(with_reason, catalog.KV), *catalog.SPECULATION, *LORA], 7.0
                ),
                "eyes": dict.fromkeys(catalog.CACHE, 3.0),
            },
        )
    finally:
        pair.close()
    samples = planes.samples({"talk": numbers})
    assert sum(len(values) for values in samples.values()) == len(numbers)
    assert [metric.name for metric, values in samples.items() if not values] == []
    assert samples[catalog.EDGE_TRANSFER_BYTES] == {("talk", "thinker", "talker", "shm"): 5}
    assert samples[catalog.EDGE_TRANSFERS_IN_FLIGHT] == {("talk", "thinker", "talker", "shm"): 1}
    assert samples[catalog.EDGE_OLDEST_TRANSFER] == {("talk", "thinker", "talker", "shm"): 0.5}
    assert samples[catalog.EDGE_QUARANTINED] == {("talk", "thinker", "talker", "shm"): 2}
    assert samples[catalog.EDGE_INSTANCES] == {("talk", "thinker", "talker", "shm", "memory"): 2}
    assert samples[catalog.ENGINE["kv_blocks_used"]] == {("talk", "chat"): 7}
    assert samples[catalog.KV["kv_local_total"]] == {("talk", "chat", "short"): 7}
    assert samples[catalog.LORA["adapter_requests_total"]] == {("talk", "chat", "org/sql.2"): 7}
    assert samples[catalog.CONTROL_EVENTS] == {("talk", "resent"): 3, ("talk", "received"): 4}


def test_numbers_of_a_newer_process_are_left_out() -> None:
    numbers = {"relay_pigeon_flown_miles": 7.0, "sends_queued": 1.0, "new": 2.0, "relay_pigeon_sent_bytes": 3.0}
    numbers |= {"engine_steps_total.day:chat": 4.0, "engine_kv_local_total:chat": 5.0}
    samples = planes.samples({"talk": numbers})
    assert {metric.name: values for metric, values in samples.items() if values} == {
        "omnipipeline_sends_queued": {("talk",): 1},
        "omnipipeline_relay_sent_bytes_total": {("talk", "pigeon"): 3},
    }


def test_the_transports_of_a_process_are_a_row_for_each_relay_of_an_edge() -> None:
    numbers = planes.gauges(
        relays={},
        transfers_in_flight=0,
        sends_queued=0,
        events={},
        edges={("a", "b", "shm"): EdgeNumbers(5, 4, 1, 2, 0.5, 1, 6)},
        edge_transports={
            ("a", "b", "tcp", "tcp+curve"): 3,
            ("a", "b", "tcp", "unix"): 1,
            ("a", "c", "in_process", "reference"): 1,
        },
    )
    assert planes.transports(numbers) == [
        {
            "source": "a",
            "target": "b",
            "relay": "shm",
            "instances": {},
            "transfer_bytes": 5,
            "copied_bytes": 4,
            "transfers_in_flight": 2,
            "oldest_transfer": 0.5,
            "quarantined": 1,
            "failovers": 1,
            "retries": 6,
        },
        {"source": "a", "target": "b", "relay": "tcp", "instances": {"tcp+curve": 3, "unix": 1}},
        {"source": "a", "target": "c", "relay": "in_process", "instances": {"reference": 1}},
    ]


def test_the_shares_of_loading_stages_come_back_as_rows_and_not_as_metrics() -> None:
    shares = {"llm": (1.2e9, 2.8e9, "B"), "a:b": (3.0, 0.0, ""), "idle": (0.0, 0.0, "")}
    numbers = planes.loading(shares)
    assert planes.loading_of({**numbers, "sends_queued": 1.0}) == [
        {"stage": "llm", "done": 1.2e9, "total": 2.8e9, "unit": "B"},
        {"stage": "a:b", "done": 3.0, "total": 0.0, "unit": ""},
    ]
    assert not any(values for values in planes.samples({"talk": numbers}).values())


def test_numbers_that_no_share_can_have_are_left_out() -> None:
    for done, total in ((math.nan, 1.0), (1.0, math.inf), (-1.0, 2.0), (1.0, -2.0)):
        assert planes.loading_of({"stage_loading_done:a": done, "stage_loading_total:a": total}) == []


@pytest.mark.parametrize("count", [math.nan, math.inf, -math.inf])
def test_places_that_no_stage_has_are_unknown(count: float) -> None:
    assert planes.places_of({"stage_places:talker": count, "stage_places:thinker": 4.0}, "talker") == 0
    assert planes.places_of({"stage_places:talker": count, "stage_places:thinker": 4.0}, "thinker") == 4


def test_a_rank_that_no_process_has_is_a_name_like_any_other() -> None:
    absurd = f"rank{'9' * 5000}/sends_queued"
    assert planes.by_rank({absurd: 1.0, "rank12/x": 2.0, "x": 3.0}) == {0: {absurd: 1.0, "x": 3.0}, 12: {"x": 2.0}}
