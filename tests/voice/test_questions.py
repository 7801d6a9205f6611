from __future__ import annotations

import pytest

from tests.voice import questions


@pytest.mark.parametrize(
    ("spoken", "understood", "expected"),
    [
        ("What is it?", "what is it", 0.0),
        ("a b c d", "a x c d", 0.25),
        ("a b c d", "a b c d e", 0.25),
        ("a b c d", "b c d", 0.25),
        ("a b", "", 1.0),
    ],
)
def test_the_word_error_rate_counts_changes_per_word_said(spoken: str, understood: str, expected: float) -> None:
    assert questions.word_error_rate(spoken, understood) == expected


def test_a_seed_always_gives_the_same_question_and_seeds_differ() -> None:
    assert questions.pick(7) == questions.pick(7)
    assert len({questions.pick(seed).fact for seed in range(40)}) > 20


def test_the_new_fact_replaces_the_one_it_contradicts() -> None:
    puzzle = questions.Puzzle(fact="The name of the keeper is Ada.", question="?", keyword="Ada")
    others = "# facts\nThe name of the keeper is Bob.\nWater boils.\n"
    assert sorted(questions.facts_with(puzzle, others).splitlines()) == [
        "# facts",
        "The name of the keeper is Ada.",
        "Water boils.",
    ]
