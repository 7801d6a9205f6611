from __future__ import annotations

from stage_models.voice import prompting
from stage_models.voice.conversation import Fact, Turn


def turn(role: str, text: str) -> Turn:
    return Turn(role=role, text=text)


def test_facts_stand_right_before_the_question_the_best_last() -> None:
    facts = [Fact(text="best", score=0.9), Fact(text="good", score=0.5)]
    assert prompting.build([turn("user", "Who?")], facts, max_turns=4) == [
        turn("system", prompting.GROUNDED),
        turn("user", "good\nbest\n\nWho?"),
    ]


def test_without_facts_the_model_is_asked_for_what_it_knows() -> None:
    turns = [turn("user", "Who?")]
    assert prompting.build(turns, [], max_turns=4) == [turn("system", prompting.INSTRUCTION), *turns]


def test_the_clients_own_instruction_takes_the_place_of_ours_and_old_turns_go_first() -> None:
    turns = [turn("system", "Be rude."), *(turn("user", str(index)) for index in range(5))]
    assert prompting.build(turns, [], max_turns=2) == [turn("system", "Be rude."), turn("user", "3"), turn("user", "4")]
