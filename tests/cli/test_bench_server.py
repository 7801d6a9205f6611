"""`omni bench` against a real server: what it sends, what it makes of streams, sound and failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from stage_runtime.cli.running import bench
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Audio, Text, Usage
from tests.web.running import Running, start
from tests.web.scripted_manager import Script, chunk, play

SAID: Script = play(chunk(Text("he")), chunk(Text("llo"), index=1), chunk([Text("!"), Usage(9, 3)], index=2))
SOUND: Script = play(chunk(Audio(np.zeros(2400, np.float32), 24_000)), chunk(Audio(np.zeros(2400, np.float32), 24_000)))


async def benched(running: Running, *options: str) -> Result:
    given = [running.url, "--num-prompts", "5", "--random-input-len", "4", "--max-concurrency", "2", *options]
    return await asyncio.to_thread(CliRunner().invoke, bench.command, given)


async def test_a_stream_is_timed_and_its_usage_counted(tmp_path: Path) -> None:
    async with start(SAID) as running:
        options = ["--goodput", "ttft:60000 e2el:60000", "--extra-body", '{"top_k": 3}', "--num-warmups", "2"]
        given = await benched(running, "--json", "--save-detailed", "--result-dir", str(tmp_path), *options)
        requests = [one.request for one in running.manager.handles]
    assert given.exit_code == 0, given.output
    found = json.loads(given.stdout)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (5, 0, 15)
    assert (found["model_id"], found["request_rate"], found["total_input_tokens"]) == ("org/hello", "inf", 45)
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert found["mean_ttfa_ms"] is None
    assert found["request_goodput"] == found["request_throughput"]
    assert len(requests) == 7 and requests[0].stream
    assert requests[0].params == {"max_tokens": 128, "top_k": 3}
    [file] = tmp_path.iterdir()
    saved = json.loads(file.read_text())
    assert [len(one) for one in saved["itls"]] == [2] * 5 and saved["output_lens"] == [3] * 5


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/audio/speech"])
async def test_completions_and_speech_are_measured_too(endpoint: str) -> None:
    async with start(SOUND if "speech" in endpoint else SAID) as running:
        given = await benched(running, "--endpoint", endpoint, "--json", "--request-rate", "1000")
        kinds = {one.request.kind for one in running.manager.handles}
    found = json.loads(given.stdout)
    assert (found["completed"], kinds) == (5, {endpoint.split("/")[-1].removesuffix("s")})
    assert (found["mean_ttfa_ms"] is None) == ("completions" in endpoint)


async def test_the_summary_is_for_people_and_failures_are_told() -> None:
    async with start(SAID) as running:
        given = await benched(running, "--arrivals", "constant", "--request-rate", "200")
    assert "Successful requests:                     5" in given.output
    assert "Median TTFT (ms):" in given.output and "TTFA" not in given.output
    failing = play(chunk(Text("x")), RequestError("stage_failed", "no", stage="talk"))
    async with start(failing) as running:
        given = await benched(running)
    assert given.exit_code == 1
    assert "5 requests failed; the first: " in given.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--request-rate", "0"], "'0': expected a number above 0, or inf"),
        (["--goodput", "ttft"], "'ttft': expected METRIC:MS"),
        (["--percentile-metrics", "p99"], "'p99': expected some of ttft"),
        (["--metric-percentiles", "101"], "'101': expected numbers from 0 to 100"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt needs --dataset-path FILE"),
        (["--extra-body", "[]"], "expected an object"),
        (["--extra-body", "[" * 100_000], "expected JSON"),
        (["--random-range-ratio", "nan"], "nan is not a finite number"),
        (["--burstiness", "1e308", "--request-rate", "1e308"], "no times follow from these rates"),
        (["--model", "m"], "Connect"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_options_end_with_a_line(options: list[str], problem: Any) -> None:
    given = CliRunner().invoke(bench.command, ["http://127.0.0.1:1", "--num-prompts", "1", *options])
    assert given.exit_code in (1, 2) and problem in given.output, given.output
