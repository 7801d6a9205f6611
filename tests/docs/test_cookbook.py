"""docs/cookbook.md: each recipe's files are written, its pipeline runs, and its client prints what the page shows."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.cli.test_up import PATIENCE_S, base
from tests.docs.blocks import FENCE, ROOT
from tests.e2e.local_pipelines import running

__all__ = ["base"]

PAGE = (ROOT / "docs/cookbook.md").read_text()
RECIPES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_there_are_five_recipes_of_some_sixty_lines() -> None:
    assert len(RECIPES) == 5
    lines = {name: sum(body.count("\n") for _, body in FENCE.findall(text)) for name, text in RECIPES.items()}
    assert all(count <= 75 for count in lines.values()), lines


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_recipe_prints_what_the_page_shows(
    recipe: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *files, (kind, printed) = FENCE.findall(RECIPES[recipe])
    assert kind == "text"
    for _, body in files:
        (tmp_path / body.splitlines()[0].removeprefix("# ")).write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with running(tmp_path / "pipeline.yaml", base) as pipeline:
        environ = {**os.environ, "OPENAI_BASE_URL": f"{pipeline.url}/v1", "OPENAI_API_KEY": "none", "no_proxy": "*"}
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            tmp_path / "ask.py",
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(client.communicate(), PATIENCE_S)
    assert out.decode() == printed, errors.decode()
