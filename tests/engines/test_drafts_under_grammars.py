"""Drafts of requests whose answers follow a grammar: as far as it allows them, and to the same answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.reasoning import AnswerMatcher
from stage_runtime.engines.autoregressive.text.structured_output import draft_masks
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.engines.autoregressive.text.structured_output.grammars import Grammars
from tests.engines.generation_kit import END, VOCABULARY, Answers, core, tiny_tokenizer
from tests.engines.test_generation_exact import prompts
from tests.engines.test_speculation import Foreseeing

pytest.importorskip("llguidance")
USER, ASSISTANT = 257, 258  #: Tokens that stand for the tags of thinking.
SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"enum": ["xyxyxy", "yes", "no"]},
        "list": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 5},
        "text": {"type": "string", "maxLength": 12},
    },
    "required": ["word", "list", "text"],
    "additionalProperties": False,
}


def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), VOCABULARY, frozenset({END}))


def tokens(text: str) -> list[int]:
    found: list[int] = tiny_tokenizer()(text)["input_ids"]
    return found


@pytest.mark.parametrize(
    ("draft", "followed"),
    [('"yes"', 5), ('"yxs"', 2), ('x"', 0), ("", 0), ('"no",', 5), ('"no"]x', 4), ('"no"]<end>', 4)],
)
def test_a_draft_is_followed_as_far_as_its_grammar_allows(draft: str, followed: int) -> None:
    """The last token of a whole answer is sampled, not drafted: nothing can follow it."""
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": SCHEMA["properties"]["word"]}))  # type: ignore[index]
    matcher = grammars().compile(grammar)
    assert matcher.take(tokens("[")[0])
    mask = matcher.mask()
    after = draft_masks.along(matcher, mask, tokens(draft))
    assert len(after) == followed
    assert (matcher.mask() == mask).all(), "it stays where it was"
    for index, one in enumerate(after, 1):
        reached = grammars().compile(grammar)
        for token in tokens("[" + draft)[: index + 1]:
            assert reached.take(token)
        assert (reached.mask() == one).all()


def test_a_draft_goes_on_from_thinking_to_the_answer() -> None:
    def thinking() -> AnswerMatcher:
        answer = grammars().compile(Grammar("json_schema", '{"const": 12}'))
        return AnswerMatcher(answer, think=USER, thought=ASSISTANT, begun=True, ends=[END], size=VOCABULARY)

    matcher = thinking()
    draft = [7, 8, ASSISTANT, *tokens("1"), *tokens("3")]
    after = draft_masks.along(matcher, matcher.mask(), draft)
    assert len(after) == 4 and after[1][7] and not after[1][END]
    assert after[2].nonzero()[0].tolist() == tokens("1") and after[3].nonzero()[0].tolist() == tokens("2")
    assert matcher.take(7) and matcher.mask()[7], "it still thinks"


class _Breaking:
    """`Matcher`: its mask fails behind the second token."""

    ended = False

    def __init__(self, taken: int = 0) -> None:
        self._taken = taken

    def mask(self) -> Any:
        if self._taken == 2:
            raise ValueError("too many items")
        return grammars().compile(Grammar("regex", ".*")).mask()

    def take(self, token: int) -> bool:
        self._taken += 1
        return True

    def copy(self) -> _Breaking:
        return _Breaking(self._taken)


def test_a_draft_whose_grammar_fails_is_cut_there() -> None:
    matcher = _Breaking()
    assert len(draft_masks.along(matcher, matcher.mask(), tokens("abc"))) == 1
    assert matcher.mask().any()


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}])
def test_answers_under_a_schema_are_those_without_drafts(overlapping: bool, params: dict[str, Any]) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    chosen = SamplingParams(**{"temperature": 0.0, **params}, max_tokens=90, grammar=grammar)
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    whole: dict[str, Sequence[int]] = {}
    found, steps = [], []
    for drafts in (0, 4):
        engine = core(
            proposer=Foreseeing(whole),
            num_speculative_tokens=drafts,
            max_batched_tokens=64,
            overlapping=overlapping,
            grammars=grammars().compile,
        )
        answers = Answers(engine)
        for index, prompt in enumerate(prompts([14, 5, 20])):
            answers.ask(str(index), prompt, chosen if index else free)
        answers.run()
        whole = {name: [*given, 0] for name, given in answers.tokens.items()}
        found.append((answers.tokens, answers.finish))
        steps.append(engine.steps)
        accepted = engine.scheduler.stats.accepted_tokens
        assert engine.scheduler.pool.free == engine.scheduler.pool.capacity
        engine.shutdown()
    assert found[0] == found[1]
    for name in "12":
        answer = json.loads(bytes_of(found[0][0][name]))
        assert set(answer) == {"word", "list", "text"}
    assert accepted > 40 and steps[1] < steps[0] / 2


def bytes_of(answer: Sequence[int]) -> str:
    text: str = tiny_tokenizer().decode([token for token in answer if token < END])
    return text
