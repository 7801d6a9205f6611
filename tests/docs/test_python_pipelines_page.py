"""The files of docs/python-pipelines.md, written beside each other and used as the page says."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from omnipipeline_spec import loading, planning
from omnipipeline_spec.generating import writing
from omnipipeline_spec.types.errors import UnreadableSpec
from stage_runtime.cli import main
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.docs.blocks import FENCE, ROOT
from tests.imported import forget_modules_of

PAGE = ROOT / "docs/python-pipelines.md"
FILES = ["words.py", "family.py", "loud.yaml", "silent.resource.yaml", "packed.py", "run.py"]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files; their modules are forgotten afterwards. pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield from _written(Path(name), monkeypatch)


def _written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for _, body in FENCE.findall(PAGE.read_text()):
        name, _, text = body.partition("\n")
        (folder / name.removeprefix("# ")).write_text(text)
    monkeypatch.chdir(folder)
    yield folder
    monkeypatch.undo()
    forget_modules_of(folder)


def arguments(file: str) -> dict[str, object]:
    spec = loading.load(file).spec
    return {stage.name: stage.factory_args for stage in spec.stages}


def test_every_block_of_the_page_is_a_file_that_is_tried_here(folder: Path) -> None:
    assert [body.partition("\n")[0].removeprefix("# ") for _, body in FENCE.findall(PAGE.read_text())] == FILES


def test_values_classes_and_files_are_what_the_page_says(folder: Path) -> None:
    assert arguments("words.py") == arguments("words.py:pipeline") == {"split": {}, "count": {"unit": "words"}}
    assert arguments("loud.yaml") == {"split": {}, "count": {"unit": "WORDS"}}
    with pytest.raises(UnreadableSpec, match="has several pipelines"):
        loading.load("family.py")
    plain, silent = loading.load("family.py:plain"), loading.load("family.py:silent")
    assert (plain.name, plain.spec.serves, silent.name, silent.spec.serves) == ("plain", ("chat",), "silent", ())
    changed = loading.load("words.py", overrides=["stages.count.factoryArgs.unit=tokens"])
    assert changed.spec.stage("count").factory_args == {"unit": "tokens"}


def test_what_convert_prints_is_what_the_page_shows(folder: Path) -> None:
    done = CliRunner().invoke(main, ["convert", "family.py:silent"])
    assert done.stdout == (folder / "silent.resource.yaml").read_text()
    again = loading.load("silent.resource.yaml")
    assert planning.plan(again.spec, name=again.name) == planning.plan(loading.load("family.py:silent").spec)


def test_a_program_and_a_packed_pipeline_do_what_the_page_says(folder: Path) -> None:
    runpy.run_path("run.py")
    resource = loading.loads(writing.convert(loading.load("packed.py").spec))
    assert resource.spec.code is not None
    assert resource.spec.code.inline == {"words.py": (folder / "words.py").read_text()}


async def test_the_value_runs_with_the_functions_of_its_own_file(folder: Path) -> None:
    base = [f"endpoints.basePath={folder}"]
    async with (
        LocalPipeline("words.py", overrides=base, options=LocalOptions(port=0)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=100) as client,
    ):
        body = {"model": "any", "messages": [{"role": "user", "content": "one two three"}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "3 words"
