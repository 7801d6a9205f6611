"""The command line of ``vllm bench serve`` as `omni bench` reads it: options with several values, those not here.

Here: the command's class, and the reason for each of vLLM's options that `omni bench` lacks. Not here: the options that
it has (`flags`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import click

from stage_runtime.cli.running.measuring import statistics

_NO_TOKENIZER: Final = "no tokenizer is loaded here: random prompts are words, and lengths are those of the usage"
_EXTRA: Final = "write it into --extra-body"
_DATASET: Final = "its dataset is not here: bring its prompts as a file of --dataset-name custom"
#: An option of ``vllm bench serve`` (of 2026-11) that is not here -> why, or what to use.
NOT_HERE: Final[Mapping[str, str]] = {
    "--tokenizer": _NO_TOKENIZER,
    "--tokenizer-mode": _NO_TOKENIZER,
    "--trust-remote-code": _NO_TOKENIZER,
    "--skip-chat-template": "prompts are sent as they are; --endpoint says whether as a chat",
    "--enable-multimodal-chat": "prompts have text alone",
    "--use-beam-search": "no pipeline has beam search",
    "--logprobs": _EXTRA,
    "--chat-template-kwargs": _EXTRA,
    "--lora-modules": "run it once for each adapter, with its name as --model",
    "--lora-assignment": "run it once for each adapter, with its name as --model",
    "--profile": "record one with `omni profile` meanwhile",
    "--no-stream": "it is about datasets of a hub, which are not here; answers are always streamed",
    "--plot-timeline": "nothing is drawn: --save-detailed has each request's times, and `omni trace` draws requests",
    "--timeline-itl-thresholds": "nothing is drawn: --save-detailed has each request's times",
    "--plot-dataset-stats": "nothing is drawn: --save-detailed has the lengths",
    "--probe-request-rate": "run a second `omni bench` beside it",
    "--self-timed": "traces with times of their own are not here",
    "--no-self-timed": "traces with times of their own are not here",
    "--random-batch-size": "only generation is measured",
    "--no-reranker": "only generation is measured",
    **dict.fromkeys(
        (
            "--spec-bench-output-len",
            "--spec-bench-category",
            "--sonnet-input-len",
            "--sonnet-output-len",
            "--sonnet-prefix-len",
            "--blazedit-min-distance",
            "--blazedit-max-distance",
            "--random-mm-base-items-per-request",
            "--random-mm-num-mm-items-range-ratio",
            "--random-mm-limit-mm-per-prompt",
            "--random-mm-bucket-config",
            "--hf-subset",
            "--hf-split",
            "--hf-name",
            "--hf-output-len",
        ),
        _DATASET,
    ),
}
_PAIRS: Final = ("--header", "--metadata")


class Command(click.Command):
    """Takes several values behind one option where vLLM does, and says why an option of vLLM is not here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(spread(args)))
        except click.NoSuchOption as error:
            reason = NOT_HERE.get(error.option_name)
            if reason is None:
                raise
            raise click.UsageError(f"{error.option_name} of `vllm bench serve` is not here: {reason}", ctx) from error


def spread(arguments: Sequence[str]) -> Iterator[str]:
    """``--goodput ttft:500 tpot:50`` as ``--goodput ttft:500 --goodput tpot:50``; so for options that take pairs."""
    option, taken = "", 0
    for one in arguments:
        if one.startswith("-"):
            option, taken = one, 0
        elif taken and _continues(option, one):
            yield option
        else:
            taken += 1
        yield one


def _continues(option: str, value: str) -> bool:
    """Whether the value is one more of the option, and not the URL."""
    if option == "--goodput":
        return value.partition(":")[0] in statistics.METRICS
    return option in _PAIRS and "=" in value and "://" not in value.partition("=")[0]
