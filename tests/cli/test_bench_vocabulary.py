"""`omni bench` beside `vllm bench serve`: every option of that program is taken, or named with the reason."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from stage_runtime.cli.running import bench
from stage_runtime.cli.running.measuring import vocabulary
from tests.cli.test_bench_server import SAID, benched
from tests.web.running import start

#: All options of vLLM's ``vllm/benchmarks/serve.py`` and ``datasets/arg_utils.py``, November 2026.
VLLM = """
--seed --num-prompts --dataset-name --no-stream --dataset-path --no-oversample --skip-chat-template --disable-shuffle
--enable-multimodal-chat --trust-remote-code --custom-output-len --spec-bench-output-len --spec-bench-category
--sonnet-input-len --sonnet-output-len --sonnet-prefix-len --sharegpt-output-len --blazedit-min-distance
--blazedit-max-distance --random-input-len --random-output-len --random-range-ratio --random-prefix-len
--random-batch-size --no-reranker --random-mm-base-items-per-request --random-mm-num-mm-items-range-ratio
--random-mm-limit-mm-per-prompt --random-mm-bucket-config --hf-subset --hf-split --hf-name --hf-output-len
--prefix-repetition-prefix-len --prefix-repetition-suffix-len --prefix-repetition-num-prefixes
--prefix-repetition-output-len --label --backend --base-url --host --port --endpoint --header --max-concurrency --model
--input-len --output-len --tokenizer --tokenizer-mode --use-beam-search --logprobs --request-rate --burstiness
--probe-request-rate --disable-tqdm --num-warmups --profile --save-result --save-detailed --append-result --metadata
--result-dir --result-filename --ignore-eos --self-timed --no-self-timed --percentile-metrics --metric-percentiles
--goodput --request-id-prefix --top-p --top-k --min-p --temperature --frequency-penalty --presence-penalty
--repetition-penalty --served-model-name --lora-modules --lora-assignment --ramp-up-strategy --ramp-up-start-rps
--ramp-up-end-rps --ready-check-timeout-sec --chat-template-kwargs --extra-body --skip-tokenizer-init --insecure
--plot-timeline --timeline-itl-thresholds --plot-dataset-stats
""".split()
#: The names of a saved result of vLLM, `--save-detailed` included; those of speculation and diffusion are left out.
RESULT = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration
completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors
max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms
mean_itl_ms mean_e2el_ms mean_client_queue_time_ms p99_e2el_including_client_queue_ms
""".split()


def refused(*options: str) -> str:
    done = CliRunner().invoke(bench.command, ["http://127.0.0.1:1", *options])
    assert done.exit_code == 2, done.output
    return re.sub(r"\s+", " ", done.output)


def test_every_option_of_vllm_is_taken_or_has_its_reason_and_never_both() -> None:
    ours = {name for option in bench.command.params if isinstance(option, click.Option) for name in option.opts}
    assert set(VLLM) <= ours | vocabulary.NOT_HERE.keys()
    assert not ours & vocabulary.NOT_HERE.keys()
    assert vocabulary.NOT_HERE.keys() <= set(VLLM)


@pytest.mark.parametrize("option", vocabulary.NOT_HERE)
def test_an_option_that_is_not_here_is_refused_with_its_reason(option: str) -> None:
    assert f"{option} of `vllm bench serve` is not here: {vocabulary.NOT_HERE[option]}" in refused(option, "1")


def test_an_option_that_nobody_has_is_refused_as_click_does() -> None:
    assert "No such option '--goodputt'" in refused("--goodputt", "1")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--goodput", "ttft:5", "tpot:3", "http://h"], ["--goodput", "ttft:5", "--goodput", "tpot:3", "http://h"]),
        (["--goodput", "ttft:5", "localhost:80"], ["--goodput", "ttft:5", "localhost:80"]),
        (["--header", "a=1", "b=2", "--seed", "1"], ["--header", "a=1", "--header", "b=2", "--seed", "1"]),
        (["--metadata", "a=1", "http://h?b=2"], ["--metadata", "a=1", "http://h?b=2"]),
        (["--goodput", "e2el:1", "--seed", "2", "ttft:1"], ["--goodput", "e2el:1", "--seed", "2", "ttft:1"]),
    ],
)
def test_several_values_behind_one_option_are_read_as_vllm_reads_them(given: list[str], read: list[str]) -> None:
    assert list(vocabulary.spread(given)) == read


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--backend", "openai", "--endpoint", "/v1/chat/completions"], "--backend openai sends to /v1/completions"),
        (["--port", "9"], "expected one server, got http://127.0.0.1:1 and http://127.0.0.1:9"),
        (["--dataset-path", __file__], "--dataset-name random has no file"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (
            [
                "--ramp-up-strategy",
                "linear",
                "--ramp-up-start-rps",
                "1",
                "--ramp-up-end-rps",
                "2",
                "--request-rate",
                "3",
            ],
            "sets the rate: leave out --request-rate",
        ),
        (
            ["--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "2"],
            "above 0 if exponential",
        ),
        (["--header", "x"], "'x': expected KEY=VALUE"),
        (["--metadata", "=x"], "'=x': expected KEY=VALUE"),
    ],
)
def test_options_that_contradict_are_refused_before_anything_is_sent(options: list[str], problem: str) -> None:
    assert problem in refused(*options)


async def test_a_saved_result_has_vllms_names_and_is_named_as_vllm_names_it(tmp_path: Path) -> None:
    metrics = "ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue"
    options = ["--backend", "openai-chat", "--percentile-metrics", metrics, "--save-detailed", "--request-rate", "500"]
    named = ["--result-dir", str(tmp_path), "--label", "mine", "--metadata", "tp=2", "build=x", "--goodput", "ttft:9e9"]
    async with start(SAID) as running:
        given = await benched(running, *options, *named, "--disable-tqdm", "--skip-tokenizer-init")
    assert given.exit_code == 0, given.output
    [file] = tmp_path.iterdir()
    assert re.fullmatch(r"mine-500\.0qps-concurrency2-hello-\d{8}-\d{6}\.json", file.name)
    found = json.loads(file.read_text())
    assert set(RESULT) <= found.keys()
    assert (found["tp"], found["build"], found["label"], found["backend"]) == ("2", "x", "mine", "openai-chat")
    assert found["generated_texts"] == ["hello!"] * 5 and len(found["start_times"]) == 5
    assert 1 <= found["max_concurrent_requests"] <= 2 and found["max_output_tokens_per_s"] > 0
    assert found["p99_e2el_including_client_queue_ms"] >= found["p99_e2el_ms"]


async def test_results_are_appended_line_by_line(tmp_path: Path) -> None:
    options = ["--append-result", "--result-dir", str(tmp_path), "--result-filename", "r.jsonl"]
    async with start(SAID) as running:
        for seed in ("1", "2"):
            assert (await benched(running, *options, "--seed", seed)).exit_code == 0
    assert [json.loads(line)["seed"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == [1, 2]


async def test_headers_ids_sampling_and_a_ready_check_reach_the_server() -> None:
    options = ["--request-id-prefix", "b-", "--top-p", "0.5", "--top-k", "3", "--frequency-penalty", "1"]
    asked = ["--host", "127.0.0.1", "--backend", "vllm", "--served-model-name", "org/hello", "--model", "other"]
    ready = ["--ready-check-timeout-sec", "60", "--header", "X-Request-Priority=1"]
    async with start(SAID) as running:
        port = running.url.rpartition(":")[2]
        given = [*asked, "--port", port, "--num-prompts", "3", "--output-len", "7", *options, *ready, "--json"]
        done = await asyncio.to_thread(CliRunner().invoke, bench.command, given)
        requests: list[Any] = [one.request for one in running.manager.handles]
    assert done.exit_code == 0, done.output
    assert {"b-0", "b-1", "b-2"} < {one.id for one in requests} and len(requests) == 4
    expected = {"max_tokens": 7, "top_p": 0.5, "top_k": 3, "frequency_penalty": 1.0}
    assert all(expected.items() <= one.params.items() for one in requests)
    assert {one.kind for one in requests} == {"completion"}


def test_a_server_that_does_not_get_ready_ends_the_command_with_the_reason() -> None:
    given = ["http://127.0.0.1:1", "--num-prompts", "1", "--ready-check-timeout-sec", "1"]
    done = CliRunner().invoke(bench.command, given)
    assert done.exit_code == 1
    assert "not ready within 1 s: All connection attempts failed" in done.output
