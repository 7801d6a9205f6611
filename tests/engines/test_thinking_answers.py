"""Thinking apart from the answer: in streams and whole, beside stop strings, calls, grammars and log probabilities."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.text.reasoning import ThoughtSplitter
from stage_runtime.web.translating.generation import chat
from tests.engines.generation_kit import tiny_tokenizer
from tests.engines.test_call_answers import ANSWER, ARGUMENTS, CALLS, FORMS, TOOLS, WRITTEN
from tests.engines.writing_kit import Answer, Writing

OPENED = "<assistant><think>\n"  # at the end of a prompt, as DeepSeek's templates do
CLOSED = "<assistant><think>\n\n</think>\n\n"  # as Qwen's do without thinking


def writing(text: str, *, prompt: str = "", form: str = "hermes", reasoning: str = "think") -> Writing:
    return Writing(text, prompt=prompt, form=form, reasoning=reasoning, tokenizer=tagged_tokenizer())


def tagged_tokenizer() -> object:
    """Each tag is one token, as in the models that have them."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.mark.parametrize(
    ("text", "prompt", "thought", "content"),
    [
        ("<think>\nso it is\n</think>\n\nyes", "", "so it is", "yes"),
        ("\n<think>so</think>yes", "", "so", "yes"),
        ("so it\n\nis\n</think>\n\nyes\n", OPENED, "so it\n\nis", "yes\n"),
        ("<think>\n\n</think>\n\nyes", "", "", "yes"),
        ("yes", CLOSED, "", "yes"),
        (" yes", "", "", " yes"),
        ("<thinker>", "", "", "<thinker>"),
        ("yes <think>no</think>", "", "", "yes <think>no</think>"),
        ("<think>a</think>b<think>c</think>", "", "a", "b<think>c</think>"),
        ("<think>a </thin b</think>c", "", "a </thin b", "c"),
    ],
)
def test_thinking_is_not_content(text: str, prompt: str, thought: str, content: str) -> None:
    [found] = writing(text, prompt=prompt)()
    assert found == Answer(content, [], "stop", [], reasoning=thought)


def test_an_answer_cut_inside_its_thinking_has_no_content() -> None:
    text = "<think>\nso it is \n</think>\n\nyes"
    tokens = tagged_tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    for count in range(1, len(tokens)):
        [found] = writing(text)(max_tokens=count)
        assert found.finish == "length"
        assert "so it is".startswith(found.reasoning)
        assert "yes".startswith(str(found.content))
        assert not found.content or found.reasoning == "so it is"


def test_a_stage_may_leave_thinking_in_the_text() -> None:
    text = "<think>so</think>yes"
    [found] = writing(text, reasoning="none")()
    assert (found.content, found.reasoning) == (text, "")


def test_a_client_may_leave_it_out() -> None:
    [found] = writing("<think>so</think>yes")(include_reasoning=False)
    assert (found.content, found.reasoning) == ("yes", "")


@pytest.mark.parametrize("stop", ["so", "\n", ["think", "it"], "<"])
def test_stop_strings_are_looked_for_after_the_thinking(stop: str | list[str]) -> None:
    [found] = writing("<think>\nso it is\n</think>\n\nyes")(stop=stop)
    assert (found.content, found.reasoning) == ("yes", "so it is")


@pytest.mark.parametrize("prompt", ["", OPENED])
@pytest.mark.parametrize("form", FORMS)
def test_calls_count_after_the_thinking_only(form: str, prompt: str) -> None:
    first, second = WRITTEN[form]
    opening = "" if prompt else "<think>"
    [found] = writing(f"{opening}I may {first}</think>\n{second}", form=form, prompt=prompt)(tools=TOOLS)
    assert (found.calls, found.reasoning) == (CALLS[1:], f"I may {first}")
    assert not str(found.content).strip()


@pytest.mark.parametrize("prompt", ["", OPENED])
def test_a_grammar_holds_after_the_thinking_only(prompt: str) -> None:
    answer = json.dumps({"colour": "blue"})
    opening = "" if prompt else "<think>"
    [found] = writing(f"{opening}red, or {{}}?</think>{answer}", prompt=prompt)(response_format=ANSWER)
    assert (found.content, found.reasoning) == (answer, "red, or {}?")


def test_an_answer_without_thinking_follows_its_grammar_from_its_first_token() -> None:
    [found] = writing("certainly not JSON")(response_format=ANSWER)
    assert json.loads(str(found.content))["colour"] in ("red", "blue")
    assert not found.reasoning


def test_thinking_under_a_grammar_does_not_end_the_answer() -> None:
    """The model would end there; instead it must go on, until it is cut."""
    [found] = writing("<think>so")(response_format=ANSWER, max_tokens=40)
    assert (found.content, found.finish) == ("", "length")
    assert found.reasoning.startswith("so")


@pytest.mark.parametrize("form", FORMS)
def test_a_forced_call_may_be_thought_about(form: str) -> None:
    first = WRITTEN[form][0].removeprefix("[TOOL_CALLS]")
    forced = {"type": "function", "function": {"name": "weather"}}
    [found] = writing(f"<think>which?</think>{first}", form=form)(tools=TOOLS, tool_choice=forced)
    assert (found.calls, found.reasoning) == ([("weather", ARGUMENTS)], "which?")


def test_log_probabilities_are_of_the_content() -> None:
    [found] = writing("<think>\nso\n</think>\n\nyes, é")(logprobs=True)
    assert bytes(byte for one in found.shown for byte in one["bytes"]).decode() == found.content == "yes, é"


PIECES = ["<think>", "</think>", "<", "think", "</", ">", " ", "\n", "a", "é"]


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.booleans())
@example(["<think>", " ", "</think>", "\n", "a"], False)
@settings(deadline=None)
def test_pieces_of_a_text_give_what_the_whole_text_gives(pieces: list[str], begun: bool) -> None:
    text = "".join(pieces)
    found = [split(parts, begun=begun) for parts in ([text], [*text], pieces)]
    assert found[0] == found[1] == found[2]
    thought, answer = found[0]
    assert thought == thought.strip()
    whole = ("<think>" if begun else "") + text
    assert thought in whole
    assert whole.endswith(answer)


def split(parts: list[str], *, begun: bool) -> tuple[str, str]:
    splitter = ThoughtSplitter(begun=begun)
    found = [*map(splitter.feed, parts), splitter.flush()]
    return "".join(one.thought for one in found), "".join(one.answer for one in found)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "so"}, "so"),
        ({"reasoning": "so"}, "so"),
        ({"reasoning": {"effort": "high"}}, None),
        ({"reasoning_content": 5}, None),
        ({"reasoning_content": None, "reasoning": [{"text": "so"}]}, None),
    ],
)
def test_thinking_of_earlier_answers_reaches_the_stages_if_it_is_text(fields: object, expected: str | None) -> None:
    earlier = {"role": "assistant", "content": "yes", **dict(fields)}  # type: ignore[call-overload]
    body = chat.decode(json.dumps({"messages": [earlier, {"role": "user", "content": "hi"}]}).encode())
    found = chat.request(body, "r", {})
    assert found.inputs["messages"][0].get("reasoning_content") == expected
