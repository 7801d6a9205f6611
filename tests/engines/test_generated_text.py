"""Tokens to text as they come: nothing is lost or doubled, no half character, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import transformers as untyped
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput
from stage_runtime.engines.autoregressive.core.output.output_processor import (
    OutputProcessor,
    RequestOutput,
    RequestOutputCollector,
)
from stage_runtime.engines.autoregressive.sampling.model_output import TokenLogprobs
from stage_runtime.engines.autoregressive.sampling.parameters import OutputKind, SamplingParams
from stage_runtime.engines.autoregressive.text.detokenizer import Detokenizer, Spelling, StopStrings
from stage_runtime.rules.autoregressive.requests import FinishReason
from tests.engines.generation_kit import tiny_tokenizer

transformers: Any = untyped


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte."""
    return bytes(tokens).decode(errors="replace")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(text=TEXTS, cuts=st.lists(st.integers(1, 5), max_size=80))
def test_the_pieces_are_the_text_and_each_is_whole_characters(text: str, cuts: list[int]) -> None:
    detokenizer, tokens, pieces = Detokenizer(decode), list(text.encode()), []
    for cut in cuts:
        pieces.append(detokenizer.feed(tokens[:cut]))
        tokens = tokens[cut:]
    pieces += [detokenizer.feed(tokens), detokenizer.flush()]
    assert "".join(pieces) == text
    assert not [piece for piece in pieces if "\ufffd" in piece] or "\ufffd" in text


def test_what_is_left_of_a_character_is_given_out_at_the_end() -> None:
    detokenizer = Detokenizer(decode)
    assert detokenizer.feed([*b"a", 0xE2, 0x82]) == ""
    assert detokenizer.flush() == "a\ufffd"


@pytest.mark.parametrize("silent", [b"\0", b"\xe2"])
def test_a_token_costs_the_decoding_of_a_few_however_many_before_it_gave_no_text(silent: bytes) -> None:
    """Special tokens after the end, where it is ignored, and bytes that make no character."""
    longest = 0

    def counted(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode([token for token in tokens if token])

    detokenizer = Detokenizer(counted)
    text = detokenizer.feed(b"before ")
    for _ in range(1000):
        text += detokenizer.feed(silent)
    assert longest < 100
    text += detokenizer.feed(b" after") + detokenizer.flush()
    assert text.replace("\ufffd", "") == "before  after"
    assert text.count("\ufffd") == (1000 if silent == b"\xe2" else 0)


def test_a_space_after_many_tokens_without_text_is_kept() -> None:
    """Tokenizers of words leave out the space before the first one that they are given."""
    words = {0: "", 1: " a", 2: " b"}

    def spoken(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens)[1:]

    detokenizer = Detokenizer(spoken)
    assert [detokenizer.feed([token]) for token in (1, *[0] * 200, 2)] == ["a", *[""] * 200, " b"]


@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop_string_however_it_is_cut(text: str, stops: list[str]) -> None:
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    stopper, given_out, reached = StopStrings(stops), "", None
    for letter in text:
        piece, reached = stopper.feed(letter)
        given_out += piece
        if reached is not None:
            break
    else:
        given_out += stopper.flush()
    if not found:
        assert (given_out, reached) == (text, None)
    else:
        # Letter by letter the string that is complete first ends the text, which may begin after another one's start.
        assert reached in stops
        assert text.startswith(given_out + str(reached))
        assert len(given_out) + len(str(reached)) == min(text.find(stop) + len(stop) for _at, stop in found)


def sentence_pieces() -> Any:
    """A tokenizer whose vocabulary falls back to bytes, as Llama 2's."""
    words = ["<unk>", "</s>", "▁hi", "▁", "\N{REPLACEMENT CHARACTER}", "▁\N{REPLACEMENT CHARACTER}"]
    vocabulary = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(
        models.BPE(
            vocab={one: index for index, one in enumerate(vocabulary)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(parts)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


@pytest.mark.parametrize(
    "text", ["a", "é", "\N{WOMAN}", "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}", " \N{REPLACEMENT CHARACTER}"]
)
def test_the_bytes_of_an_answer_s_tokens_are_those_of_its_text(text: str) -> None:
    for tokenizer, ids in (
        (tiny_tokenizer(), tiny_tokenizer()(text)["input_ids"]),
        (sentence_pieces(), [6 + byte for byte in text.encode()]),
    ):
        spelling = Spelling(tokenizer)
        assert len(ids) == len(text.encode())
        assert b"".join(spelling.bytes_of(token) for token in ids).decode() == text


def test_a_vocabulary_s_own_replacement_character_is_spelled_as_it_is() -> None:
    spelling = Spelling(sentence_pieces())
    assert spelling.bytes_of(4).decode() == "\N{REPLACEMENT CHARACTER}"
    assert spelling.bytes_of(5).decode() == " \N{REPLACEMENT CHARACTER}"
    assert spelling.bytes_of(2).decode() == spelling.text_of(2)


class Counted:
    """A tokenizer that counts its decodings."""

    def __init__(self) -> None:
        self._inner = tiny_tokenizer()
        self.decodings = 0

    def __call__(self, text: str, **options: Any) -> Any:
        return self._inner(text, **options)

    def decode(self, tokens: list[int]) -> Any:
        self.decodings += 1
        return self._inner.decode(tokens)


def test_a_token_is_spelled_once_however_often_it_is_shown() -> None:
    """A prompt that is echoed with the likeliest tokens of each place shows some hundred thousand."""
    tokenizer = Counted()
    spelling = Spelling(tokenizer)
    once = spelling.bytes_of(7), spelling.bytes_of(7, first=True)
    decodings = tokenizer.decodings
    assert (spelling.bytes_of(7), spelling.bytes_of(7, first=True)) == once
    assert tokenizer.decodings == decodings > 0


PROMPT = (TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ()))


def outputs(name: str, *tokens: int, finish: FinishReason | None = None) -> list[EngineCoreOutput]:
    last = len(tokens) - 1
    return [
        EngineCoreOutput(request_id=name, new_token_ids=(token,), finish=finish if index == last else None)
        for index, token in enumerate(tokens)
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (OutputKind.DELTA, [("h", 1), ("i", 2), ("!", 3)]),
        (OutputKind.CUMULATIVE, [("h", 1), ("hi", 2), ("hi!", 3)]),
        (OutputKind.FINAL_ONLY, [("hi!", 3)]),
    ],
)
def test_outputs_are_deltas_or_all_so_far_or_the_end_alone(kind: OutputKind, expected: list[tuple[str, int]]) -> None:
    processor = OutputProcessor(decode)
    processor.add_request("a", SamplingParams(output_kind=kind), 5)
    found = [
        (made.text, made.generated, made.finish, made.prompt_tokens)
        for one in outputs("a", *b"hi!", finish=FinishReason.LENGTH)
        for made in processor.process_outputs([one]).outputs
    ]
    assert found == [
        (text, count, FinishReason.LENGTH if index == len(expected) - 1 else None, 5)
        for index, (text, count) in enumerate(expected)
    ]
    assert len(processor) == 0


@pytest.mark.parametrize("kind", OutputKind)
def test_log_probabilities_of_the_prompt_are_in_one_delta_or_in_every_later_output(kind: OutputKind) -> None:
    processor, collector = OutputProcessor(decode), RequestOutputCollector(kind)
    processor.add_request("a", SamplingParams(output_kind=kind, prompt_logprobs=1), 3, collector)
    first = EngineCoreOutput(request_id="a", new_token_ids=(97,), prompt_logprobs=PROMPT)
    last = EngineCoreOutput(request_id="a", new_token_ids=(98,), finish=FinishReason.LENGTH)
    found = []
    for one in (first, last):
        processor.process_outputs([one])
        if (given := collector.get_nowait()) is not None:
            found.append(given.prompt_logprobs)
    assert (
        found
        == {
            OutputKind.DELTA: [PROMPT, ()],
            OutputKind.CUMULATIVE: [PROMPT, PROMPT],
            OutputKind.FINAL_ONLY: [PROMPT],
        }[kind]
    )


def test_a_stop_string_across_tokens_ends_the_text_and_the_core_is_notified_once() -> None:
    processor = OutputProcessor(decode)
    processor.add_request("a", SamplingParams(stop=("END",)), 1)
    processor.add_request("b", SamplingParams(), 1)
    found, aborts = "", []
    for one in outputs("a", *b"xEyEND z"):
        processed = processor.process_outputs([one, *outputs("b", 65)])
        found += "".join(made.text for made in processed.outputs if made.request_id == "a")
        aborts += processed.reqs_to_abort
    assert (found, aborts) == ("xEy", ["a"])


@pytest.mark.parametrize(
    ("stop", "least", "text"),
    [
        ("ab", 0, "x"),
        ("ab", 2, "x"),  # begun by a token that could not end it
        ("ab", 3, "xab"),
        ("ab", 4, "xab"),
        ("ab", 5, "xabab"),
        ("ab", 100, "xabababz"),
        ("b", 2, "xa"),
        ("b", 3, "xaba"),
        ("b", 5, "xababa"),
    ],
)
def test_a_stop_string_ends_the_text_only_with_a_token_after_the_least_number(stop: str, least: int, text: str) -> None:
    processor = OutputProcessor(decode)
    processor.add_request("a", SamplingParams(stop=(stop,), min_tokens=least, max_tokens=200), 1)
    found = ""
    for one in outputs("a", *b"xabababz", finish=FinishReason.LENGTH):
        processed = processor.process_outputs([one])
        found += "".join(made.text for made in processed.outputs)
        if processed.reqs_to_abort:
            break
    assert found == text


def test_a_token_that_ends_the_answer_is_no_text_and_a_held_beginning_of_a_stop_is() -> None:
    processor = OutputProcessor(decode)
    processor.add_request("a", SamplingParams(stop=("END",)), 1)
    *_, last = [processor.process_outputs([one]) for one in outputs("a", *b"xEN", 0, finish=FinishReason.STOP)]
    assert [(made.text, made.finish, made.generated) for made in last.outputs] == [("EN", FinishReason.STOP, 4)]
    assert last.reqs_to_abort == []


def test_outputs_of_an_aborted_request_are_dropped() -> None:
    processor = OutputProcessor(decode)
    processor.add_request("a", SamplingParams(), 1)
    processor.abort_requests(["a", "a"])
    assert processor.process_outputs(outputs("a", 65)) == ([], [], [])


def test_a_collector_joins_deltas_replaces_the_whole_and_an_error_wins() -> None:
    deltas, whole = RequestOutputCollector(OutputKind.DELTA), RequestOutputCollector(OutputKind.CUMULATIVE)
    for text in ("a", "ab"):
        for collector in (deltas, whole):
            collector.put(RequestOutput(request_id="r", text=text, token_ids=(1,), generated=len(text)))
    assert deltas.get_nowait() == RequestOutput(request_id="r", text="aab", token_ids=(1, 1), generated=2)
    assert whole.get_nowait() == RequestOutput(request_id="r", text="ab", token_ids=(1,), generated=2)
    assert deltas.get_nowait() is None
    deltas.put(ValueError("broken"))
    deltas.put(RequestOutput(request_id="r"))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            deltas.get_nowait()
