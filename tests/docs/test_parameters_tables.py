"""Each parameter of generation stands on the pages that promise it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.web.reading.generation_fields import ChatFields, CompletionFields, handlings

DOCS = Path(__file__).parents[2] / "docs"
#: Fields that no request sets by their name.
OF_PROGRAMS = {"grammar", "hidden_rows", "output_kind"}


def _section(page: str, title: str) -> str:
    """The text under a heading, down to the next one of its level."""
    text = (DOCS / page).read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/{page} has no section {title!r}"
    return found[1]


@pytest.mark.parametrize("name", handlings(ChatFields))
def test_the_page_of_chats_names_what_it_hands_on(name: str) -> None:
    assert f"`{name}`" in _section("http-api.md", "Chat")


@pytest.mark.parametrize("name", sorted(handlings(CompletionFields).keys() - handlings(ChatFields).keys()))
def test_the_page_of_completions_names_what_is_its_own(name: str) -> None:
    assert f"`{name}`" in (DOCS / "http-api.md").read_text()


@pytest.mark.parametrize("name", sorted(set(SamplingParams.__struct_fields__) - OF_PROGRAMS))
def test_the_page_of_the_engine_names_its_parameters(name: str) -> None:
    assert f"`{name}`" in _section("engine.md", "Parameters of a request")
