"""The result of a benchmark as JSON, and its file. Names are those of ``vllm bench serve``, which tools read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stage_runtime.cli.running.measuring import bench_options
from stage_runtime.cli.running.measuring.statistics import Outcome


def facts(given: Mapping[str, Any], base: str, model: str) -> dict[str, Any]:
    """The run: where to, how much, how fast."""
    rate = given["request_rate"]
    found = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": bench_options.backend(given),
        "backend": bench_options.backend(given),
        "label": given["label"],
        "base_url": base,
        "endpoint": bench_options.endpoint(given),
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": given["num_prompts"],
        **bench_options.pairs(given["metadata"], "--metadata"),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": given["burstiness"],
        "arrivals": given["arrivals"],
        "max_concurrency": given["max_concurrency"],
        "seed": given["seed"],
    }
    ramp = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    return found | ({name: given[name] for name in ramp} if given["ramp_up_strategy"] else {})


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Times, lengths and text of each request, in their order. Times are seconds."""
    return {
        "input_lens": [one.input_tokens for one in outcomes],
        "output_lens": [one.output_tokens for one in outcomes],
        "ttfts": [one.first_token for one in outcomes],
        "ttfas": [one.first_audio for one in outcomes],
        "itls": [list(one.gaps) for one in outcomes],
        "latencies": [one.latency for one in outcomes],
        "start_times": [one.begun for one in outcomes],
        "queue_times": [one.queued for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [one.error for one in outcomes],
    }


def save(given: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write it to the file that the options name, else to one named as vLLM names it."""
    folder: Path = given["result_dir"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / (given["result_filename"] or _name(given, found))).open(
        "a" if given["append_result"] else "w"
    ) as to:
        to.write(json.dumps(found) + "\n")


def _name(given: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    most = given["max_concurrency"]
    rate = f"{found['request_rate']}qps"
    if given["ramp_up_strategy"]:
        rate = f"ramp-up-{given['ramp_up_strategy']}-{given['ramp_up_start_rps']}qps-{given['ramp_up_end_rps']}qps"
    parts = [given["label"] or found["backend"], rate, *([f"concurrency{most}"] if most else [])]
    model = str(found["model_id"]).rsplit("/", 1)[-1]
    return "-".join([*parts, model, found["date"]]).replace("/", "_") + ".json"
