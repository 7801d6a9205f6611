"""The options of `omni bench`: names, defaults and bounds. Each one means what it does in ``vllm bench serve``.

Not here: making values of them (`bench_options`), vLLM's options that are missing (`vocabulary`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stage_runtime.cli import options
from stage_runtime.cli.running.measuring import prompts

Function = TypeVar("Function", bound=Callable[..., Any])

#: Backend of vLLM -> the path that takes such requests.
BACKENDS: Final = {
    "openai-chat": "/v1/chat/completions",
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-speech": "/v1/audio/speech",
}
ENDPOINTS: Final = tuple(dict.fromkeys(BACKENDS.values()))


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


_COUNT: Final = click.IntRange(1)
_SAMPLING: Final = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
#: Options that become fields of every request, by the same name.
SAMPLED: Final = ("temperature", *_SAMPLING)


def _spelt(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_SERVER: Final = (
    click.option("--base-url", "--url", help="The same as the argument URL."),
    click.option("--host", help="With --port instead of URL."),
    click.option("--port", type=click.IntRange(1, 65535), help="With --host instead of URL.  [default: 8000]"),
    click.option("--insecure", is_flag=True, help="Take any certificate."),
    click.option("--backend", type=click.Choice(tuple(BACKENDS)), help="The form of requests; sets --endpoint."),
    click.option("--endpoint", type=click.Choice(ENDPOINTS), help=f"[default: {ENDPOINTS[0]}]"),
    click.option("--model", help="Name of the model in requests. Default: the first of /v1/models."),
    click.option("--served-model-name", help="The same; goes before --model."),
    click.option("--header", multiple=True, metavar="KEY=VALUE", help="Sent with each request; may be repeated."),
    click.option("--request-id-prefix", metavar="TEXT", help="Requests have ids of it and their number."),
    click.option(
        "--ready-check-timeout-sec", type=click.IntRange(0), default=0, show_default=True, help="Wait for an answer."
    ),
)
_DATASETS: Final = (
    click.option("--dataset-name", type=click.Choice(prompts.DATASETS), default="random", show_default=True),
    click.option(
        "--dataset-path", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE", default=None
    ),
    click.option("--num-prompts", type=click.IntRange(1, 1_000_000), default=1000, show_default=True),
    click.option(
        "--num-warmups", type=click.IntRange(0), default=0, show_default=True, help="Requests before, not counted."
    ),
    click.option("--disable-shuffle", is_flag=True, help="Prompts of a file in its order."),
    click.option("--no-oversample", is_flag=True, help="No prompt of a file twice."),
    click.option("--input-len", type=_COUNT, help="The same as --random-input-len."),
    click.option("--output-len", type=_COUNT, help="Tokens of answers, of any dataset."),
    click.option("--random-input-len", type=_COUNT, default=1024, show_default=True, help="Words of a prompt."),
    click.option("--random-output-len", type=_COUNT, default=128, show_default=True),
    click.option(
        "--random-range-ratio",
        type=options.Finite(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="Lengths differ by this share.",
    ),
    click.option("--random-prefix-len", type=click.IntRange(0), default=0, show_default=True, help="Words in common."),
    click.option("--prefix-repetition-prefix-len", type=_COUNT, default=256, show_default=True),
    click.option("--prefix-repetition-suffix-len", type=_COUNT, default=256, show_default=True),
    click.option("--prefix-repetition-num-prefixes", type=_COUNT, default=10, show_default=True),
    click.option("--prefix-repetition-output-len", type=_COUNT, default=128, show_default=True),
    click.option("--sharegpt-output-len", type=_COUNT),
    click.option("--custom-output-len", type=_COUNT),
    click.option("--seed", type=int, default=0, show_default=True),
)
_TRAFFIC: Final = (
    click.option("--request-rate", type=_Rate(), default=math.inf, show_default=True, help="Requests a second."),
    click.option("--burstiness", type=_Rate(), default=1.0, show_default=True, help="1: Poisson; less: bursts."),
    click.option("--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True),
    click.option("--ramp-up-strategy", type=click.Choice(["linear", "exponential"]), help="Instead of a rate."),
    click.option("--ramp-up-start-rps", type=options.Finite(0), help="Requests a second at the beginning."),
    click.option("--ramp-up-end-rps", type=options.Finite(0, min_open=True), help="Requests a second at the end."),
    click.option("--max-concurrency", type=_COUNT, help="No more requests than that at once."),
)
_FIELDS: Final = (
    click.option("--ignore-eos", is_flag=True, help="Answers have all the tokens that they may have."),
    click.option("--temperature", type=float, help="Of sampling. Default: the pipeline's."),
    *(click.option(_spelt(name), type=kind, help="Parameter of sampling.") for name, kind in _SAMPLING.items()),
    click.option("--modalities", help="Of a chat's answers, such as text,audio."),
    click.option("--extra-body", metavar="JSON", help="More fields of every request."),
)
_RESULTS: Final = (
    click.option("--percentile-metrics", default="ttft,ttfa,tpot,itl,e2el", show_default=True),
    click.option("--metric-percentiles", default="50,90,99", show_default=True),
    click.option("--goodput", multiple=True, metavar="METRIC:MS", help="Bounds that good requests keep."),
    click.option("--label", help="In the result and its file's name. Default: the backend."),
    click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Written into the result; may be repeated."),
    click.option("--save-result", is_flag=True, help="Write the numbers as JSON into a file."),
    click.option("--save-detailed", is_flag=True, help="With the times and the text of each request."),
    click.option("--append-result", is_flag=True, help="Add a line to the file instead of replacing it."),
    click.option("--result-dir", type=click.Path(path_type=Path), default=Path()),
    click.option("--result-filename"),
    click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON."),
    click.option("--disable-tqdm", "--skip-tokenizer-init", is_flag=True, hidden=True, expose_value=False),
)


def flags(function: Function) -> Function:
    """All of them, in the order in which ``--help`` lists them."""
    for option in reversed((*_SERVER, *_DATASETS, *_TRAFFIC, *_FIELDS, *_RESULTS)):
        function = option(function)
    return function
