"""``omni bench``: requests at a rate, and how long their answers took. Options are named as `vllm bench serve`'s."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from omnipipeline_spec import terminal
from stage_runtime.cli import options
from stage_runtime.cli.running import runs
from stage_runtime.cli.running.measuring import bench_options, flags, results, statistics, vocabulary
from stage_runtime.cli.running.measuring.prompts import Prompt
from stage_runtime.cli.running.measuring.statistics import Outcome
from stage_runtime.errors import ConfigurationError
from stage_runtime.web.listening import pinning

TIMEOUT_S: Final = 6 * 3600.0  # as vLLM's: a benchmark measures slow answers, too
READY_STEP_S: Final = 1.0  # between two tries of a server that is not ready


@click.command("bench", cls=vocabulary.Command)
@click.argument("url", required=False)
@runs.run_options
@click.option("--api-key", envvar=["OMNI_API_KEY", "OPENAI_API_KEY"], help="API key, if the pipeline requires one.")
@flags.flags
def command(
    url: str | None,
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
        metrics = bench_options.metrics(given["percentile_metrics"])
        percentiles = bench_options.percentiles(given["metric_percentiles"])
        bounds = bench_options.bounds(given["goodput"])
        asked = bench_options.asked(given)
        load = {"endpoint": bench_options.endpoint(given), "body": bench_options.body(given)}
        load |= {"headers": bench_options.pairs(given["header"], "--header"), "id_prefix": given["request_id_prefix"]}
        times_s = bench_options.times_s(given, len(asked))
        results.facts(given, "", "")  # refuses wrong options before an hour is spent
        base, certificate = bench_options.address(given, url), None
        if base is None:
            base, certificate = runs.url(pipeline=pipeline, pid=pid, base_path=base_path)
        outcomes, duration, model = asyncio.run(_measured(base, certificate, asked, times_s, load, given))
        found = statistics.summary(outcomes, duration=duration, metrics=metrics, percentiles=percentiles, bounds=bounds)
        facts = results.facts(given, base, model)
        if any(given[name] for name in ("save_result", "save_detailed", "append_result", "result_filename")):
            results.save(given, {**facts, **found, **(results.details(outcomes) if given["save_detailed"] else {})})
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
    base: str,
    certificate: Path | None,
    asked: list[Prompt],
    times_s: list[float],
    load: dict[str, Any],
    given: dict[str, Any],
) -> tuple[list[Outcome], float, str]:
    import httpx

    from stage_runtime.cli.running.measuring import clients

    headers = {"authorization": f"Bearer {given['api_key']}"} if given["api_key"] else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        async with httpx.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=TIMEOUT_S,
            limits=limits,
            trust_env=False,
            verify=_verified(certificate, insecure=given["insecure"]),
        ) as http:
            model = await _ready(http, base, load, asked[0], given)
            sent = clients.Load(model=model, max_concurrency=given["max_concurrency"], **load)
            warmups = asked[: given["num_warmups"]]
            unnamed = clients.Load(model=model, max_concurrency=given["max_concurrency"], **{**load, "id_prefix": None})
            await clients.run(http, unnamed, warmups, [0.0] * len(warmups))
            outcomes, duration = await clients.run(http, sent, asked, times_s)
            return outcomes, duration, model
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{base}: {error}") from error
    except httpx.HTTPError as error:
        raise ConfigurationError(f"{base}: {error or type(error).__name__}") from error
    except UnicodeEncodeError:  # those of single requests are in their outcomes
        raise ConfigurationError("the API key has characters that are not ASCII") from None


def _verified(certificate: Path | None, *, insecure: bool) -> ssl.SSLContext | bool:
    import httpx

    if insecure:
        return False
    return httpx.create_ssl_context() if certificate is None else pinning.pinned(certificate)


async def _ready(http: Any, base: str, load: dict[str, Any], prompt: Prompt, given: dict[str, Any]) -> str:
    """The model's name, once a request of ``prompt`` was answered, if that is to be waited for.

    Raises: ConfigurationError: none was answered within ``--ready-check-timeout-sec``.
    """
    import httpx

    from stage_runtime.cli.running.measuring import clients

    named = given["served_model_name"] or given["model"]
    until = time.monotonic() + given["ready_check_timeout_sec"]
    if not given["ready_check_timeout_sec"]:
        return named or await _model(http, base)
    while True:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                model = named or await _model(http, base)
                outcome = await clients.ask(http, clients.Load(model=model, **{**load, "id_prefix": None}), prompt)
            if not outcome.error:
                return str(model)
            problem = outcome.error
        except TimeoutError:
            problem = "no answer"
        except (httpx.HTTPError, ConfigurationError) as error:
            problem = str(error) or type(error).__name__
        if time.monotonic() + READY_STEP_S >= until:
            raise ConfigurationError(f"{base}: not ready within {given['ready_check_timeout_sec']} s: {problem}")
        await asyncio.sleep(READY_STEP_S)


async def _model(http: Any, base: str) -> str:
    answer = await http.get("/v1/models")
    try:
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{base}/v1/models: expected a list of models; give --model") from error
