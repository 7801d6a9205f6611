"""The examples of docs/contracts.md, run as they stand: each under its heading, with what it must give."""

from __future__ import annotations

import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import stage_runtime as omni
from stage_runtime import testing
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.docs.blocks import FENCE, ROOT, section

CONTRACTS = "docs/contracts.md"


def examples(heading: str) -> list[str]:
    """The Python blocks under a heading."""
    return [body for kind, body in FENCE.findall(section(CONTRACTS, f"### {heading}")) if kind == "python"]


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """The folder where an example is executed."""
    made = types.ModuleType("documented")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.mark.parametrize(
    ("heading", "number", "payloads", "chunks", "expected"),
    [
        ("A function", 0, [{"text": "hi"}], [], [([], {"text": "hi!"})]),
        ("A function", 1, [{"a": 1, "b": 2}, {"a": 3, "b": 4}], [], [([], 3), ([], 7)]),
        ("A generator", 0, ["so it is"], [], [([{"word": "so"}, {"word": "it"}, {"word": "is"}], {"count": 3})]),
        ("Batches", 0, ["a", "abc"], [], [([], "a.."), ([], "abc")]),
        (
            "Streams in",
            0,
            [{"count": 2}],
            [omni.Chunk({"word": "a"}), omni.Chunk({"word": "b"})],
            [([omni.Text("A!"), omni.Text("B!"), omni.Usage(completion_tokens=2)], None)],
        ),
        ("A custom engine", 0, [[1, 2], [3]], [], [([], 3), ([], 3)]),
    ],
)
def test_each_kind_of_stage_function_does_what_its_example_says(
    module: types.ModuleType,
    heading: str,
    number: int,
    payloads: list[Any],
    chunks: list[omni.Chunk],
    expected: list[Any],
) -> None:
    exec(examples(heading)[number], module.__dict__)
    emitted = testing.run_stage("documented:make", payloads, chunks)
    assert [(one.data, one.result) for one in emitted] == expected


def test_an_exception_in_a_batch_fails_its_request_alone(module: types.ModuleType) -> None:
    exec(examples("Batches")[0], module.__dict__)
    good, bad = testing.run_stage("documented:make", ["a", ""])
    assert good.result == "a"
    with pytest.raises(ValueError, match="nothing to pad"):
        _ = bad.result


def test_the_example_of_a_test_passes() -> None:
    [example] = examples("Tests")
    exec(example, {"__name__": "documented"})


def test_every_example_of_the_api_is_run_here() -> None:
    headings = re.findall(r"^### (.*)$", (ROOT / CONTRACTS).read_text(), re.MULTILINE)
    found = {heading: len(examples(heading)) for heading in headings if examples(heading)}
    assert found == {
        "A function": 2,
        "A generator": 1,
        "Batches": 1,
        "Streams in": 1,
        "A custom engine": 1,
        "Tests": 1,
    }


async def test_the_example_of_hooks_routes_joins_and_refuses() -> None:
    [pipeline] = [body for kind, body in FENCE.findall(section(CONTRACTS, "### Hooks")) if kind == "yaml"]
    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        file = Path(folder) / "pipeline.yaml"
        file.write_text(pipeline)
        base = [f"endpoints.basePath={folder}"]
        async with (
            LocalPipeline(file, overrides=base, options=LocalOptions(port=0)) as running,
            httpx.AsyncClient(base_url=running.url, timeout=100) as client,
        ):

            async def ask(inputs: str) -> httpx.Response:
                return await client.post("/v1/pipeline", json={"inputs": inputs})

            assert (await ask("abc")).json()["results"] == {"join": {"take": "abc", "letters": 3}}
            assert (await ask("123")).json()["results"] == {"join": {"take": "no letters"}}
            refused = await ask("")
            assert (refused.status_code, refused.json()["error"]["message"]) == (400, "nothing to do")
