"""The options of `omni bench` as values: prompts, times, fields of requests, bounds. Refuses those that contradict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import click

from stage_runtime.cli.running.measuring import arrivals, prompts, statistics
from stage_runtime.cli.running.measuring.flags import BACKENDS, ENDPOINTS, SAMPLED
from stage_runtime.cli.running.measuring.prompts import Prompt


def endpoint(given: Mapping[str, Any]) -> str:
    """The path that requests are sent to: the backend's, the one that is given, or chats'."""
    wanted = BACKENDS.get(given["backend"])
    if wanted is not None and given["endpoint"] not in (None, wanted):
        raise click.UsageError(f"--backend {given['backend']} sends to {wanted}, and --endpoint is {given['endpoint']}")
    return wanted or given["endpoint"] or ENDPOINTS[0]


def backend(given: Mapping[str, Any]) -> str:
    """vLLM's name for the form of requests."""
    return given["backend"] or next(name for name, path in BACKENDS.items() if path == endpoint(given))


def address(given: Mapping[str, Any], url: str | None) -> str | None:
    """The server's address without ``/v1``; None: that of the `omni up` that runs here."""
    named = [one for one in (url, given["base_url"]) if one]
    if given["host"] or given["port"]:
        host = given["host"] or "127.0.0.1"
        scheme = "https" if given["insecure"] else "http"
        named.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{given['port'] or 8000}")
    if len(named) > 1:
        raise click.UsageError(f"expected one server, got {' and '.join(named)}")
    if not named:
        return None
    if not named[0].startswith(("http://", "https://")):
        raise click.UsageError(f"{named[0]!r}: expected the server's URL, such as http://127.0.0.1:8000")
    return named[0].rstrip("/").removesuffix("/v1")


def asked(given: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of the dataset."""
    random, name, count = Random(given["seed"]), given["dataset_name"], given["num_prompts"]
    if name in ("random", "prefix_repetition"):
        if given["dataset_path"] is not None:
            raise click.UsageError(f"--dataset-name {name} has no file: choose sharegpt or custom for --dataset-path")
        if name == "random":
            return prompts.random_prompts(
                count,
                input_len=given["input_len"] or given["random_input_len"],
                output_len=given["output_len"] or given["random_output_len"],
                prefix_len=given["random_prefix_len"],
                range_ratio=given["random_range_ratio"],
                random=random,
            )
        return prompts.repeated_prefixes(
            count,
            prefixes=given["prefix_repetition_num_prefixes"],
            prefix_len=given["prefix_repetition_prefix_len"],
            suffix_len=given["prefix_repetition_suffix_len"],
            output_len=given["output_len"] or given["prefix_repetition_output_len"],
            random=random,
        )
    if given["dataset_path"] is None:
        raise click.UsageError(f"--dataset-name {name} needs --dataset-path FILE")
    return prompts.of_file(
        given["dataset_path"],
        name,
        count,
        output_len=given["output_len"] or given[f"{name}_output_len"],
        random=None if given["disable_shuffle"] else random,
        oversample=not given["no_oversample"],
    )


def times_s(given: Mapping[str, Any], count: int) -> list[float]:
    """Seconds after the beginning at which each request is sent."""
    ramp = None
    if given["ramp_up_strategy"] is not None:
        start, end = given["ramp_up_start_rps"], given["ramp_up_end_rps"]
        if start is None or end is None:
            raise click.UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if not math.isinf(given["request_rate"]):
            raise click.UsageError("--ramp-up-strategy sets the rate: leave out --request-rate")
        if start > end or (start == 0 and given["ramp_up_strategy"] == "exponential"):
            raise click.UsageError(
                "--ramp-up-start-rps: expected at most --ramp-up-end-rps, and above 0 if exponential"
            )
        ramp = arrivals.Ramp(exponential=given["ramp_up_strategy"] == "exponential", start=start, end=end)
    try:
        return arrivals.times_s(
            count,
            given["request_rate"],
            burstiness=given["burstiness"],
            constant=given["arrivals"] == "constant",
            random=Random(given["seed"]),
            ramp=ramp,
        )
    except (ValueError, OverflowError) as error:  # numbers whose product or quotient no float holds
        raise click.UsageError(f"no times follow from these rates and this burstiness: {error}") from error


def body(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of every request."""
    found: dict[str, Any] = {name: given[name] for name in SAMPLED if given[name] is not None}
    if given["ignore_eos"]:
        found["ignore_eos"] = True
    if given["modalities"]:
        found["modalities"] = given["modalities"].split(",")
        if "audio" in found["modalities"]:
            found["audio"] = {"format": "pcm16"}
    if given["extra_body"]:
        try:
            extra = json.loads(given["extra_body"])
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"expected JSON: {error}", param_hint="--extra-body") from error
        if not isinstance(extra, dict):
            raise click.BadParameter("expected an object", param_hint="--extra-body")
        found |= extra
    return found


def pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """``KEY=VALUE`` each."""
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{one!r}: expected KEY=VALUE", param_hint=option)
        found[key.strip()] = value.strip()
    return found


def metrics(given: str) -> list[str]:
    """Names of metrics, separated by commas."""
    names = [one.strip() for one in given.split(",") if one.strip()]
    for name in names:
        if name not in statistics.METRICS:
            problem = f"{name!r}: expected some of {', '.join(statistics.METRICS)}"
            raise click.BadParameter(problem, param_hint="--percentile-metrics")
    return names


def percentiles(given: str) -> list[float]:
    """Numbers from 0 to 100, separated by commas."""
    try:
        found = [float(one) for one in given.split(",") if one.strip()]
    except ValueError:
        found = [math.nan]
    if not all(0 <= one <= 100 for one in found):
        raise click.BadParameter(f"{given!r}: expected numbers from 0 to 100", param_hint="--metric-percentiles")
    return found


def bounds(given: Sequence[str]) -> dict[str, float]:
    """Metric -> milliseconds."""
    found = {}
    for one in (part for text in given for part in text.split()):
        metric, _colon, bound = one.partition(":")
        try:
            value = float(bound)
        except ValueError:
            value = math.nan
        if metric not in statistics.METRICS or not value > 0:
            problem = f"{one!r}: expected METRIC:MS with one of {', '.join(statistics.METRICS)}"
            raise click.BadParameter(problem, param_hint="--goodput")
        found[metric] = value
    return found
