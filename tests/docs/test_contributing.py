"""CONTRIBUTING.md: the places that it names exist, and hold what they are said to hold."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT, blocks, section

PAGE = "CONTRIBUTING.md"
RECIPES = re.findall(r"^### (.+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
PATH = re.compile(r"`((?:[\w.]+/)+[\w.-]+|pyproject\.toml)`")
NAME = re.compile(r"`(_?[A-Za-z]\w*(?:\.[a-z_]\w*)?)`")
#: Commands and words of the text, not names in the file beside them.
WORDS = frozenset({"doc", "nginx", "browser", "netns"})


def rows(recipe: str) -> list[tuple[str, str]]:
    lines = [line for line in section(PAGE, f"### {recipe}").splitlines() if line.startswith("|")]
    return [(place.strip(), what.strip()) for place, what in (line.strip("|").split("|") for line in lines[2:])]


def test_there_is_a_recipe_for_what_people_add() -> None:
    assert RECIPES == [
        *(
            "A relay",
            "A KV connector",
            "A sampling parameter",
            "An OpenAI route",
            "Another route",
            "A field of a stage",
            "A version of the resource",
            "A setting of autoscaling",
            "A metric",
            "A child resource",
            "A wire message",
        ),
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_place_exists_and_has_what_is_named_beside_it(recipe: str) -> None:
    for place, what in rows(recipe):
        [path] = PATH.findall(place)
        if "NAME" in path:
            assert (ROOT / path.split("NAME")[0]).parent.is_dir() or (ROOT / path.split("/NAME")[0]).is_dir(), path
            continue
        assert (ROOT / path).is_file(), path
        if path.endswith(".py"):
            named = set(NAME.findall(re.split(r"[;.] ", PATH.sub("", what))[0])) - WORDS
            text = (ROOT / path).read_text()
            missing = {name for name in named if not all(part in text for part in name.split("."))}
            assert missing == set(), path


def test_every_path_of_the_page_exists() -> None:
    text = (ROOT / PAGE).read_text()
    paths = {path for path in PATH.findall(text) if "NAME" not in path}
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert len(paths) > 30


def test_every_make_target_of_the_page_exists() -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / PAGE).read_text()))
    named |= {
        word
        for block in blocks(PAGE, "sh")
        for word in re.findall(r"^make ([a-z ]+)", block, re.MULTILINE)
        for word in word.split()
    }
    assert named <= targets
    assert {"check", "test", "nightly", "crds", "pictures"} <= named
