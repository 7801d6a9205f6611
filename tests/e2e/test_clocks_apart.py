"""Profiles and records of pods whose clocks are set apart: hops stay paired and their durations right.

Clocks are set by libfaketime (Debian's package `libfaketime`), which shifts a process's clock of the day only.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests import debian
from tests.e2e.local_pipelines import APART, Client, diamond
from tests.e2e.pod_pipelines import pods

AHEAD_S: Final = {"front": 900.0, "side": -600.0, "voice": 300.0}  # the joiner's and the coordinator's are right
WORDS: Final = "the quick brown fox"
ASKED: Final = 20
PATIENCE_S: Final = 60.0  # of a client; no hop lasts longer than its request, and clocks are five times as far apart


def apart(seconds: float) -> dict[str, str]:
    return {
        "LD_PRELOAD": debian.faketime() or "",
        "FAKETIME": f"{seconds:+g}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


@pytest.mark.long
@pytest.mark.proves("clocks-apart")
@pytest.mark.debian("libfaketime")
async def test_hops_between_clocks_that_are_apart_are_paired_and_take_as_long_as_they_do(base: Path) -> None:
    root = {"OMNI_PROFILE_ROOT": str(base / "profiles")}
    environments = {name: {**root, **apart(seconds)} for name, seconds in AHEAD_S.items()}
    environments |= {"joiner": root, "coordinator": root}
    async with pods(diamond(APART), base, environments=environments) as running:
        url = running.url("coordinator")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http, Client(url) as client:
            started = await http.post("/start_request_profile", content=b'{"run_id": "apart"}')
            assert started.json()["complete"], started.text
            for _ in range(ASKED):
                await client.answer(WORDS)
            assert (await client.post({"inputs": {"text": WORDS}}, request_id="mine")).status_code == 200
            assert (await http.post("/stop_request_profile", content=b"{}")).json()["complete"]
            report = (await http.get("/profiles/apart/report")).json()
            record = (await http.get("/v1/requests/mine")).json()
    measured = {each["clock_offset_ms"] for each in report["processes"]}
    for seconds in AHEAD_S.values():  # the test can fail: the clocks were really set
        assert any(abs(offset + 1000 * seconds) < 1000 * PATIENCE_S for offset in measured), measured
    uncertain_ms = max(each["clock_uncertainty_ms"] for each in report["processes"])
    assert uncertain_ms < 1000 * PATIENCE_S / 10  # half the time that the quickest of some questions took
    hops = Counter[str]()
    for each in report["hop_breakdown"]:
        hops[each["kind"]] += each["count"]
        assert -2 * uncertain_ms <= each["p50_ms"] and each["max_ms"] < 1000 * PATIENCE_S, each
    assert hops == {"payload": (ASKED + 1) * 6, "stream": (ASKED + 1) * 2 * len(WORDS.split())}
    assert report["unpaired_hops"] == {}
    for request in report["timeline"]:
        assert request["duration_ms"] < 1000 * PATIENCE_S
        times = {each["event_name"]: each["t_rel_ms"] for each in request["events"]}
        times.pop("relay_released", None)
        assert times["request_admission"] <= min(times.values()) + 2 * uncertain_ms
        assert times["terminal_response"] >= max(times.values()) - 2 * uncertain_ms
    _check_record(record, 2 * uncertain_ms + 5)


def _check_record(record: dict[str, Any], unsure_ms: float) -> None:
    """All stages and hops within the request's time, but for what the clocks are uncertain by."""
    assert len(record["stages"]) == len(APART), json.dumps(record)
    spans = [*record["stages"].values(), *record["hops"]]
    assert all(-unsure_ms < each["start_ms"] <= each["end_ms"] < record["total_ms"] + unsure_ms for each in spans), (
        json.dumps(record)
    )
