"""``omni bench``: requests at a rate, and how long their answers took. Options are named as `vllm bench serve`'s."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import click

from omnipipeline_spec import terminal
from stage_runtime.cli import options, runs
from stage_runtime.cli.measuring import arrivals, prompts, statistics
from stage_runtime.cli.measuring.prompts import Prompt
from stage_runtime.cli.measuring.statistics import Outcome
from stage_runtime.errors import ConfigurationError
from stage_runtime.web.listening import certificates

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/audio/speech")
TIMEOUT_S: Final = 6 * 3600.0  # as vLLM's: a benchmark measures slow answers, too


class _Rate(click.ParamType[float]):
    name = "RATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            self.fail(f"{value!r}: expected a number above 0, or inf")
        return rate


@click.command("bench")
@click.argument("url", required=False)
@click.option("--base-url", "--url", help="As the argument URL.")
@runs.run_options
@click.option("--api-key", envvar="OMNI_API_KEY", help="API key, if the pipeline requires one.")
@click.option("--endpoint", type=click.Choice(ENDPOINTS), default=ENDPOINTS[0], show_default=True)
@click.option("--model", help="Name of the model in requests. Default: the first of /v1/models.")
@click.option("--dataset-name", type=click.Choice(prompts.DATASETS), default="random", show_default=True)
@click.option("--dataset-path", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE")
@click.option("--num-prompts", type=click.IntRange(1, 1_000_000), default=1000, show_default=True)
@click.option(
    "--num-warmups", type=click.IntRange(0), default=0, show_default=True, help="Requests before, not counted."
)
@click.option("--random-input-len", type=click.IntRange(1), default=1024, show_default=True, help="Words of a prompt.")
@click.option("--random-output-len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--sharegpt-output-len", "--custom-output-len", "output_len", type=click.IntRange(1))
@click.option("--request-rate", type=_Rate(), default=math.inf, show_default=True, help="Requests a second.")
@click.option(
    "--burstiness", type=_Rate(), default=1.0, show_default=True, help="1: Poisson; less: bursts; more: even."
)
@click.option("--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True)
@click.option("--max-concurrency", type=click.IntRange(1), help="No more requests than that at once.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Answers have all the tokens that they may have.")
@click.option("--temperature", type=float, help="Of sampling. Default: the pipeline's.")
@click.option("--modalities", help="Of a chat's answers, such as text,audio.")
@click.option("--extra-body", metavar="JSON", help="More fields of every request.")
@click.option("--percentile-metrics", default="ttft,ttfa,tpot,itl,e2el", show_default=True)
@click.option("--metric-percentiles", default="50,90,99", show_default=True)
@click.option("--goodput", multiple=True, metavar="METRIC:MS", help="A bound that good requests keep; may be repeated.")
@click.option("--save-result", is_flag=True, help="Write the numbers as JSON into a file.")
@click.option("--save-detailed", is_flag=True, help="With the times of each request.")
@click.option("--result-dir", type=click.Path(path_type=Path), default=Path())
@click.option("--result-filename")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    url: str | None,
    base_url: str | None,
    pipeline: str | None,
    pid: int | None,
    base_path: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Send requests to a pipeline, or to any server of OpenAI's API, and show how long their answers took.

    URL is the server's, without /v1. Default: the `omni up` that runs here. Exit code 1 when no request succeeds.
    """
    with options.errors_as_messages():
        metrics = _names(given["percentile_metrics"])
        percentiles = _percentiles(given["metric_percentiles"])
        bounds = _bounds(given["goodput"])
        asked, body = _prompts(given), _body(given)
        given_url = url or base_url
        base, certificate = (
            (given_url, None) if given_url else runs.url(pipeline=pipeline, pid=pid, base_path=base_path)
        )
        if base.rstrip("/").endswith("/v1"):
            base = base.rstrip("/")[: -len("/v1")]
        outcomes, duration, model = asyncio.run(_measured(base, certificate, asked, body, given))
        found = statistics.summary(outcomes, duration=duration, metrics=metrics, percentiles=percentiles, bounds=bounds)
        facts = _facts(given, base, model)
        if given["save_result"] or given["save_detailed"] or given["result_filename"]:
            _save(given, {**facts, **found, **(_details(outcomes) if given["save_detailed"] else {})})
        if as_json:
            terminal.document(json.dumps({**facts, **found}, indent=2))
        else:
            terminal.document("\n".join(statistics.lines(found, metrics, percentiles)))
        errors = [one.error for one in outcomes if one.error]
        if errors:
            terminal.echo(f"{len(errors)} requests failed; the first: {errors[0]}", err=True)
        if not found["completed"]:
            sys.exit(options.EXIT_FAULT)


async def _measured(
    base: str, certificate: Path | None, asked: list[Prompt], body: dict[str, Any], given: dict[str, Any]
) -> tuple[list[Outcome], float, str]:
    import httpx

    from stage_runtime.cli.measuring import clients

    headers = {"authorization": f"Bearer {given['api_key']}"} if given["api_key"] else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    verify = httpx.create_ssl_context() if certificate is None else certificates.pinned(certificate)
    try:
        async with httpx.AsyncClient(
            base_url=base, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False, verify=verify
        ) as http:
            model = given["model"] or await _model(http, base)
            load = clients.Load(
                endpoint=given["endpoint"],
                model=model,
                body=body,
                max_concurrency=given["max_concurrency"],
            )
            warmups = asked[: given["num_warmups"]]
            await clients.run(http, load, warmups, [0.0] * len(warmups))
            times_s = arrivals.times_s(
                len(asked),
                given["request_rate"],
                burstiness=given["burstiness"],
                constant=given["arrivals"] == "constant",
                random=Random(given["seed"]),
            )
            outcomes, duration = await clients.run(http, load, asked, times_s)
            return outcomes, duration, model
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{base}: {error}") from error
    except httpx.HTTPError as error:
        raise ConfigurationError(f"{base}: {error or type(error).__name__}") from error


async def _model(http: Any, base: str) -> str:
    answer = await http.get("/v1/models")
    try:
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"{base}/v1/models: expected a list of models; give --model") from error


def _prompts(given: dict[str, Any]) -> list[Prompt]:
    random = Random(given["seed"])
    if given["dataset_name"] == "random":
        return prompts.random_prompts(
            given["num_prompts"],
            input_len=given["random_input_len"],
            output_len=given["random_output_len"],
            random=random,
        )
    if given["dataset_path"] is None:
        raise click.UsageError(f"--dataset-name {given['dataset_name']} needs --dataset-path FILE")
    return prompts.of_file(
        given["dataset_path"],
        given["dataset_name"],
        given["num_prompts"],
        output_len=given["output_len"],
        random=random,
    )


def _body(given: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if given["ignore_eos"]:
        body["ignore_eos"] = True
    if given["temperature"] is not None:
        body["temperature"] = given["temperature"]
    if given["modalities"]:
        body["modalities"] = given["modalities"].split(",")
        if "audio" in body["modalities"]:
            body["audio"] = {"format": "pcm16", "voice": "default"}
    if given["extra_body"]:
        try:
            extra = json.loads(given["extra_body"])
        except ValueError as error:
            raise click.BadParameter(f"expected JSON: {error}", param_hint="--extra-body") from error
        if not isinstance(extra, dict):
            raise click.BadParameter("expected an object", param_hint="--extra-body")
        body |= extra
    return body


def _names(given: str) -> list[str]:
    names = [one.strip() for one in given.split(",") if one.strip()]
    for name in names:
        if name not in statistics.METRICS:
            problem = f"{name!r}: expected some of {', '.join(statistics.METRICS)}"
            raise click.BadParameter(problem, param_hint="--percentile-metrics")
    return names


def _percentiles(given: str) -> list[float]:
    try:
        found = [float(one) for one in given.split(",") if one.strip()]
    except ValueError:
        found = [math.nan]
    if not all(0 <= one <= 100 for one in found):
        raise click.BadParameter(f"{given!r}: expected numbers from 0 to 100", param_hint="--metric-percentiles")
    return found


def _bounds(given: tuple[str, ...]) -> dict[str, float]:
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


def _facts(given: dict[str, Any], base: str, model: str) -> dict[str, Any]:
    """The measured values."""
    rate = given["request_rate"]
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "base_url": base,
        "endpoint": given["endpoint"],
        "model_id": model,
        "num_prompts": given["num_prompts"],
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": given["burstiness"],
        "arrivals": given["arrivals"],
        "max_concurrency": given["max_concurrency"],
        "seed": given["seed"],
    }


def _details(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "input_lens": [one.input_tokens for one in outcomes],
        "output_lens": [one.output_tokens for one in outcomes],
        "ttfts": [one.first_token for one in outcomes],
        "ttfas": [one.first_audio for one in outcomes],
        "itls": [list(one.gaps) for one in outcomes],
        "e2els": [one.latency for one in outcomes],
        "errors": [one.error for one in outcomes],
    }


def _save(given: dict[str, Any], found: dict[str, Any]) -> None:
    folder: Path = given["result_dir"]
    folder.mkdir(parents=True, exist_ok=True)
    name = given["result_filename"] or f"omni-{found['request_rate']}qps-{found['date']}.json"
    (folder / name).write_text(json.dumps(found) + "\n")
