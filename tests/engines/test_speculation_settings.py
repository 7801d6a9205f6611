"""`speculative_config` of an author, as the checks of a stage read it: each wrong value is named."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.engines.autoregressive.speculation import settings
from stage_runtime.engines.autoregressive.speculation.settings import Speculation
from stage_runtime.errors import ConfigurationError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3, "model": "small"}


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 9}, (9, 9)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (4, 2)),
        ({"prompt_lookup_max": 32, "prompt_lookup_min": 1}, (32, 1)),
    ],
)
def test_a_bound_that_is_not_given_follows_the_other_one(given: dict[str, int], bounds: tuple[int, int]) -> None:
    longest, shortest = bounds
    expected = Speculation(**NGRAM, prompt_lookup_max=longest, prompt_lookup_min=shortest)  # type: ignore[arg-type]
    assert settings.checked({**NGRAM, **given}) == expected


def test_a_draft_model_has_a_model_and_perhaps_a_revision() -> None:
    assert settings.checked(DRAFT) == Speculation(**DRAFT)  # type: ignore[arg-type]
    assert settings.checked({**DRAFT, "revision": "v1"}).revision == "v1"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "expected a dict, got list"),
        (5, "expected a dict, got int"),
        (
            {**NGRAM, "draft": "small"},
            "no key 'draft' of the method ngram: there are method, num_speculative_tokens, prompt_lookup_max",
        ),
        ({}, "method=None: one of ngram, draft_model"),
        ({**NGRAM, "method": ["ngram"]}, "method=['ngram']: one of ngram"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({**NGRAM, "model": "small"}, "no key 'model' of the method ngram: there are"),
        ({**DRAFT, "prompt_lookup_max": 2}, "no key 'prompt_lookup_max' of the method draft_model: there are"),
        ({**DRAFT, "model": ""}, "model='': a folder, a GGUF file, or a name at the model hub"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "model=None: a folder"),
        ({**DRAFT, "model": 7}, "model=7: a folder"),
        ({**DRAFT, "revision": 7}, "revision=7: a text"),
        *(
            (
                {**NGRAM, "num_speculative_tokens": value},
                f"num_speculative_tokens={value!r}: a whole number from 1 to 32",
            )
            for value in (0, 33, True, 2.0, float("nan"), "3", None)
        ),
        ({**NGRAM, "prompt_lookup_min": 33}, "prompt_lookup_max=33: a whole number"),
        (
            {**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min=3: more than prompt_lookup_max=2",
        ),
    ],
)
def test_a_wrong_value_is_named(given: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        settings.checked(given)
    assert str(raised.value).startswith(f"omni.Autoregressive(speculative_config=…): {problem}")
