"""Log probabilities that a client gets: their bytes, joined, are those of the content, whatever is cut out of it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as untyped
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engines.generation_kit import tiny_tokenizer
from tests.engines.writing_kit import Answer, Writing

transformers: Any = untyped

WORDS = ["hello", "world", "é", "\N{WOMAN}", "a", "b", ",", "\n", "{", "}"]
TOOL = {"type": "function", "function": {"name": "f"}}


def byte_level() -> Any:
    return tiny_tokenizer()


def merged() -> Any:
    """Byte-level, with tokens of several letters and half characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), ("}", "Ċ"), ("ð", "Ł")]
    words = [*letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def metaspace() -> Any:
    """Words with the blank before them, and bytes for all else, as of sentencepiece; no blank at the start."""
    blank = "\N{LOWER ONE EIGHTH BLOCK}"
    words = ["<unk>", "<end>", *(blank + word for word in WORDS if word.isalpha()), *WORDS, blank]
    vocabulary = [*dict.fromkeys(words), *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(
        models.BPE(
            vocab={one: index for index, one in enumerate(vocabulary)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    parts: list[Any] = [
        decoders.Replace(blank, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>")


TOKENIZERS = {"byte-level": byte_level, "merged": merged, "metaspace": metaspace}


def check(found: Answer) -> None:
    assert b"".join(bytes(one["bytes"]) for one in found.shown).decode(errors="replace") == found.content
    for one in found.shown:
        assert one["bytes"] and one["token"] == bytes(one["bytes"]).decode(errors="replace")
        chosen = [top for top in one["top_logprobs"] if top["logprob"] == one["logprob"]]
        assert not one["top_logprobs"] or chosen[0]["bytes"] == one["bytes"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_bytes_of_shown_tokens_joined_are_those_of_the_content(kind: str, data: Any) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = st.integers(0, len(tokenizer) - 1)
    written = st.lists(st.sampled_from(WORDS)).map(" ".join)
    script: Any = data.draw(st.one_of(st.lists(ids, max_size=20), written))
    params: dict[str, Any] = {
        "stop": data.draw(st.lists(st.sampled_from(["lo", " w", "é", "b", "}", "o wor"]), max_size=2)),
        "max_tokens": data.draw(st.integers(1, 40)),
        "min_tokens": data.draw(st.integers(0, 1)),
        "n": data.draw(st.integers(1, 2)),
        "top_logprobs": data.draw(st.integers(0, 2)),
    }
    if data.draw(st.booleans()):
        params["tools"] = [TOOL]
    for one in Writing(script, tokenizer=tokenizer, end=tokenizer.eos_token_id)(logprobs=True, **params):
        assert not one.error
        check(one)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_blanks_between_words_are_shown(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    [found] = Writing("hello world é", tokenizer=tokenizer, end=tokenizer.eos_token_id)(logprobs=True)
    check(found)
    assert found.content == "hello world é"


def test_calls_stop_strings_and_the_end_token_are_not_shown() -> None:
    for form, call in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
    ):
        [found] = Writing(f"so {call} on STOP never", form=form)(tools=[TOOL], logprobs=True, stop="STOP")
        check(found)
        assert (found.content, len(found.shown), found.calls) == ("so  on ", 7, [("f", "{}")])
        [found] = Writing(call, form=form)(tools=[TOOL], logprobs=True)
        assert (found.content, found.shown) == ("", [])
    [found] = Writing("hi")(logprobs=True)
    assert [one["token"] for one in found.shown] == ["h", "i"]


def test_the_end_token_of_a_completion_is_shown_because_clients_count_tokens() -> None:
    ended = Writing("hi").completed("so", logprobs=1)
    assert (ended["text"], ended["logprobs"]["tokens"]) == ("hi", ["h", "i", "<end>"])
    assert ended["logprobs"]["token_logprobs"] == [-1.0] * 3
    assert ended["logprobs"]["text_offset"] == [0, 1, 2]
    for more in ({"max_tokens": 2}, {"stop": "!"}):
        cut = Writing("hi!").completed("so", logprobs=1, **more)
        assert (cut["text"], cut["logprobs"]["tokens"]) == ("hi", ["h", "i"])


def test_a_token_that_a_stop_string_cuts_is_shown_as_far_as_it_is_content() -> None:
    tokenizer = merged()
    [found] = Writing("a hello}\n", tokenizer=tokenizer, end=tokenizer.eos_token_id)(logprobs=True, stop=["ello", "\n"])
    assert [one["token"] for one in found.shown] == ["a", " ", "h"]
    check(found)


def test_an_answer_of_a_schema_is_shown_whole() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["é\n", "x"]}}}
    for tools in ({}, {"tools": [TOOL]}):
        [found] = Writing('"é\\n"')(logprobs=True, response_format=schema, n=1, **tools)
        assert found.content == '"é\\n"'
        check(found)


def test_other_likely_tokens_have_the_blank_before_their_word() -> None:
    tokenizer = metaspace()
    known = tokenizer.get_vocab()
    script = [known["hello"], 2 * known["▁world"]] if 2 * known["▁world"] < len(tokenizer) else [known["hello"]]
    [found] = Writing(script, tokenizer=tokenizer, end=tokenizer.eos_token_id)(logprobs=True, top_logprobs=2)
    check(found)
    assert [one["token"] for one in found.shown[1].get("top_logprobs", [])][1] == " world"
