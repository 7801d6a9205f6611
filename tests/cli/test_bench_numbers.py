"""The numbers of `omni bench`: when requests are sent, percentiles, goodput; and the files that it reads. Pure."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.cli.running.measuring import arrivals, prompts, statistics
from stage_runtime.cli.running.measuring.statistics import Outcome
from stage_runtime.errors import ConfigurationError

FINE = Outcome(latency=1.0, first_token=0.2, gaps=(0.1, 0.3), input_tokens=10, output_tokens=5)
SLOW = Outcome(latency=3.0, first_token=1.2, gaps=(0.5,), input_tokens=20, output_tokens=3)
SPOKEN = Outcome(latency=2.0, first_audio=0.4)
FAILED = Outcome(latency=0.1, error="503: no")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert statistics.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@given(st.integers(1, 200), st.floats(0.01, 1000), st.sampled_from([0.1, 1.0, 50.0]), st.booleans())
def test_requests_come_in_order_and_the_last_one_on_time(
    count: int, rate: float, burstiness: float, constant: bool
) -> None:
    found = arrivals.times_s(count, rate, burstiness=burstiness, constant=constant, random=Random(1))
    assert len(found) == count and found == sorted(found) and found[0] >= 0
    assert found[-1] == pytest.approx(count / rate)


def gaps(**given: Any) -> Any:
    found = arrivals.times_s(4000, 10.0, **{"burstiness": 1.0, "constant": False, "random": Random(7), **given})
    return np.diff(found)


def test_gaps_are_exponential_bursty_even_or_equal() -> None:
    def variation(values: Any) -> float:
        return float(np.std(values) / np.mean(values))

    assert variation(gaps()) == pytest.approx(1.0, abs=0.1)
    assert variation(gaps(burstiness=0.25)) == pytest.approx(2.0, abs=0.3)
    assert variation(gaps(burstiness=100.0)) == pytest.approx(0.1, abs=0.02)
    assert variation(gaps(constant=True)) == pytest.approx(0.0, abs=1e-6)
    everything = arrivals.times_s(3, math.inf, burstiness=1.0, constant=False, random=Random(1))
    assert everything == [0.0, 0.0, 0.0]


def test_a_summary_counts_what_succeeded() -> None:
    found = statistics.summary(
        [FINE, SLOW, SPOKEN, FAILED],
        duration=4.0,
        metrics=["ttft", "ttfa", "tpot", "itl", "e2el"],
        percentiles=[50, 99.9],
        bounds={"ttft": 500, "itl": 300},
    )
    counts = ("completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput")
    assert [found[name] for name in counts] == [3, 1, 30, 8, 0.75]
    assert (found["output_throughput"], found["total_token_throughput"], found["request_goodput"]) == (2.0, 9.5, 0.25)
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (700.0, 700.0)
    assert (found["mean_tpot_ms"], found["mean_ttfa_ms"]) == (pytest.approx((200 + 900) / 2), 400.0)
    assert (found["mean_itl_ms"], found["p50_itl_ms"]) == (pytest.approx(300), pytest.approx(300))
    assert found["p99.9_e2el_ms"] == pytest.approx(float(np.percentile([1000, 3000, 2000], 99.9)))
    assert found["std_e2el_ms"] == pytest.approx(float(np.std([1000, 3000, 2000])))


def test_nothing_is_a_number_where_nothing_succeeded() -> None:
    found = statistics.summary([FAILED], duration=0.0, metrics=["ttft"], percentiles=[99], bounds={})
    assert (found["completed"], found["request_goodput"], found["mean_ttft_ms"], found["p99_ttft_ms"]) == (
        0,
        None,
        None,
        None,
    )
    assert len(statistics.lines(found, ["ttft"], [99])) == 12


def test_a_request_is_good_only_if_it_kept_every_bound() -> None:
    assert FINE.is_good({"ttft": 200, "tpot": 200, "e2el": 1000})
    assert not FINE.is_good({"ttft": 199.9})
    assert not SPOKEN.is_good({"ttft": 1000})  # it has no such time
    assert not FAILED.is_good({"e2el": 1000})


def test_an_answer_of_one_token_keeps_every_bound_of_what_follows_the_first() -> None:
    one = Outcome(latency=0.3, first_token=0.2, output_tokens=1)
    assert one.is_good({"tpot": 1, "itl": 1, "ttft": 200}) and not one.is_good({"tpot": 1, "ttft": 199})
    assert not Outcome(latency=0.3, first_token=0.2).is_good({"tpot": 1})  # the server did not count its tokens
    assert not SPOKEN.is_good({"itl": 1000})


def test_conversations_give_their_first_turn_and_the_length_of_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    turns = [{"from": "human", "value": "who is it there"}, {"from": "gpt", "value": "it is me of course"}]
    short = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "it is me of course"}]
    file.write_bytes(msgspec.json.encode([{"conversations": turns}, {"conversations": short}, {"conversations": []}]))
    found = prompts.of_file(file, "sharegpt", 3, output_len=None, random=Random(1))
    assert [(one.text, one.output) for one in found] == [("who is it there", 5)] * 3
    assert prompts.of_file(file, "sharegpt", 1, output_len=7, random=Random(1))[0].output == 7


@pytest.mark.parametrize(
    ("asked", "answered", "output_len", "taken"),
    [
        (1024, 1024, None, True),
        (1025, 10, None, False),
        (1000, 1049, None, False),
        (1000, 5000, 100, True),
        (4, 3, None, False),
        (4, 3, 100, True),
        (3, 100, 100, False),
    ],
)
def test_conversations_of_unusual_length_are_left_out(
    tmp_path: Path, asked: int, answered: int, output_len: int | None, taken: bool
) -> None:
    turns = [{"value": "a " * asked}, {"value": "b " * answered}]
    usual = [{"value": "c " * 5}, {"value": "d " * 5}]
    file = tmp_path / "a.json"
    file.write_bytes(msgspec.json.encode([{"conversations": turns}, {"conversations": usual}]))
    found = prompts.of_file(file, "sharegpt", 2, output_len=output_len, random=None)
    assert (found[0].text[0] == "a") is taken


@pytest.mark.parametrize(
    ("dataset", "content", "problem"),
    [
        ("sharegpt", "{", "expected JSON in ShareGPT's form"),
        ("sharegpt", "[" * 100_000, "expected JSON in ShareGPT's form"),
        ("custom", "[" * 100_000, ":1: expected JSON"),
        ("sharegpt", "{}", "expected a list of conversations, got dict"),
        ("sharegpt", "[1]", r"\[0\].conversations: expected a list of turns"),
        ("sharegpt", '[{"conversations": [{"value": 1}]}]', r"\[0\].conversations: expected turns with a text"),
        ("sharegpt", "[]", "expected prompts of the dataset sharegpt, got none"),
        ("custom", '{"prompt": "a"}\n{', ":2: expected JSON"),
        ("custom", '{"prompt": 1}', ":1: expected an object with a text as prompt"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', ":1: expected an object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_in_another_form_is_refused_with_the_place(
    tmp_path: Path, dataset: str, content: str, problem: str
) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=problem):
        prompts.of_file(file, dataset, 1, output_len=None, random=Random(1))


def test_random_prompts_are_the_same_for_the_same_seed() -> None:
    made = [prompts.random_prompts(3, input_len=20, output_len=4, random=Random(seed)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert [len(one.text.split()) for one in made[0]] == [20, 20, 20]


@pytest.mark.parametrize(("exponential", "gaps"), [(False, [1, 0.4, 0.25]), (True, [1, 0.5, 0.25])])
def test_a_ramp_goes_from_its_first_rate_to_its_last(exponential: bool, gaps: list[float]) -> None:
    ramp = arrivals.Ramp(exponential=exponential, start=1, end=4)
    found = arrivals.times_s(3, math.inf, burstiness=1.0, constant=True, random=Random(1), ramp=ramp)
    assert np.diff([0, *found]) == pytest.approx(gaps)


def test_a_ramp_that_begins_at_nothing_sends_its_first_request_at_once() -> None:
    ramp = arrivals.Ramp(exponential=False, start=0, end=2)
    found = arrivals.times_s(3, math.inf, burstiness=1.0, constant=True, random=Random(1), ramp=ramp)
    assert found == pytest.approx([0, 1, 1.5])


def test_peaks_count_what_came_in_a_second_and_what_was_under_way_at_once() -> None:
    first = Outcome(latency=1.5, begun=0.0, first_token=0.5, gaps=(0.1, 0.1, 0.8))
    second = Outcome(latency=1.0, begun=1.0, first_token=0.2)
    third = Outcome(latency=1.0, begun=1.5, first_token=0.2)
    found = statistics.summary([first, second, third, FAILED], duration=4.0, metrics=[], percentiles=[], bounds={})
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (3.0, 2)


def test_lengths_of_random_prompts_differ_by_the_ratio_behind_a_common_prefix() -> None:
    found = prompts.random_prompts(200, input_len=100, output_len=10, random=Random(1), prefix_len=5, range_ratio=0.5)
    lengths = {len(one.text.split()) for one in found}
    assert min(lengths) >= 55 and max(lengths) <= 155 and len(lengths) > 50
    assert {one.output for one in found} == set(range(5, 16))
    assert len({" ".join(one.text.split()[:5]) for one in found}) == 1


def test_repeated_prefixes_are_as_many_as_asked_for_and_evenly_used() -> None:
    found = prompts.repeated_prefixes(40, prefixes=4, prefix_len=8, suffix_len=3, output_len=2, random=Random(1))
    begins = [" ".join(one.text.split()[:8]) for one in found]
    assert sorted(begins.count(one) for one in set(begins)) == [10] * 4
    assert {len(one.text.split()) for one in found} == {11} and begins != sorted(begins)


def test_a_file_keeps_its_order_and_its_number_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "p{index}"}}\n' for index in range(9)))
    kept = prompts.of_file(file, "custom", 100, output_len=3, random=None, oversample=False)
    assert kept == [prompts.Prompt(f"p{index}", 3) for index in range(9)]
    again = prompts.of_file(file, "custom", 20, output_len=3, random=None)
    assert [one.text for one in again[9:11]] == ["p0", "p1"] and len(again) == 20
