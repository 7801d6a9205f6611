"""Aborts that came to the wrong coordinator: whom they are passed on to, and when the answer is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.requests import forwarding
from stage_runtime.rules.requests.forwarding import Inquiry


def test_it_is_passed_on_to_every_coordinator_but_the_one_that_asks() -> None:
    assert forwarding.owners("new", {"new": 1, "old": 2, "older": 3}) == ("old", "older")
    assert forwarding.owners("new", {"new": 1}) == ()


def test_without_anybody_to_ask_nothing_was_aborted() -> None:
    assert Inquiry([]).outcome is False


@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.booleans(), min_size=1, max_size=3), min_size=1),
    st.randoms(use_true_random=False),
)
def test_one_owner_that_has_aborted_is_enough_and_no_is_said_only_when_all_have_answered(
    answers: dict[str, list[bool]], random: object
) -> None:
    """answers: what the owners say that each instance has asked."""
    inquiry = Inquiry(answers)
    coming = [(instance, one) for instance, answers_of_it in answers.items() for one in answers_of_it]
    random.shuffle(coming)  # type: ignore[attr-defined]
    for number, (instance, aborted) in enumerate(coming, 1):
        inquiry.answered(instance, aborted=aborted, owners=len(answers[instance]))
        heard = [one for _, one in coming[:number]]
        assert inquiry.outcome is (True if any(heard) else False if number == len(coming) else None)


def test_an_instance_that_is_gone_is_not_waited_for() -> None:
    inquiry = Inquiry(["a", "b"])
    inquiry.answered("a", aborted=False, owners=0)
    inquiry.gone("b")
    assert inquiry.outcome is False
    inquiry.answered("b", aborted=True, owners=1)
    assert inquiry.outcome is False, "an answer stands"
