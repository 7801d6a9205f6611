"""The README's first steps work as they stand: its files, its curl line, its Python, its commands."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.docs.blocks import ROOT, blocks
from tests.patience import patience

ADDRESS = "localhost:8000"


async def output_of(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, env={**os.environ, "no_proxy": "*"})
    printed, _ = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0
    return printed.decode()


async def as_curl(line: str) -> httpx.Response:
    """Do as curl would with ``curl URL -H HEADER -d BODY``; a clean machine has none."""
    _, url, dash_h, header, dash_d, body = shlex.split(line)
    assert (dash_h, dash_d) == ("-H", "-d")
    name, _, value = header.partition(": ")
    async with httpx.AsyncClient(timeout=100) as client:
        return await client.post(f"http://{url}", headers={name: value}, content=body)


def command(start: str) -> str:
    """The one shell line of the README that begins so."""
    [line] = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line.startswith(start)]
    return line


@pytest.fixture
def written() -> Iterator[Path]:
    """The README's two files, in a folder of their own; pytest's paths are too long for sockets."""
    stages, _ = blocks("README.md", "python")
    [pipeline] = blocks("README.md", "yaml")
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        (Path(folder) / "stages.py").write_text(stages)
        (Path(folder) / "pipeline.yaml").write_text(pipeline)
        yield Path(folder)


async def test_the_pipeline_of_the_readme_answers_its_curl_line_and_its_python(written: Path) -> None:
    _, program = blocks("README.md", "python")
    base = [f"endpoints.basePath={written}"]
    async with LocalPipeline(written / "pipeline.yaml", overrides=base, options=LocalOptions(port=0)) as running:
        host = running.url.removeprefix("http://")
        answer = await as_curl(command("curl ").replace(ADDRESS, host))
        content = answer.json()["choices"][0]["message"]["content"]
        assert content == "HELLO!! THERE!! "
        assert f"`content` is `{content}`" in (ROOT / "README.md").read_text()
        assert await output_of(sys.executable, "-c", program.replace(ADDRESS, host)) == content


def test_the_files_of_the_readme_have_ten_lines_at_most() -> None:
    stages, _ = blocks("README.md", "python")
    [pipeline] = blocks("README.md", "yaml")
    assert [len([line for line in text.splitlines() if line]) <= 10 for text in (stages, pipeline)] == [True, True]


def test_the_readme_installs_what_exists() -> None:
    extras = re.findall(r"\[(\w+)\]", command("pip install "))
    assert extras and set(extras) <= set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    assert command("git clone ") and (ROOT / "constraints.txt").exists()
    for resource in re.findall(r"-f (examples/\S+)", (ROOT / "README.md").read_text()):
        assert (ROOT / resource).exists(), resource


def test_the_commands_of_the_readme_exist() -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    assert {"demo", "test", "hops"} <= targets
    assert command("make demo") and command("make test")
    assert (ROOT / "benchmarks/hops.py").exists()


def test_a_question_that_cannot_be_read_is_named_before_the_demo_starts_anything(tmp_path: Path) -> None:
    missing = tmp_path / "question.wav"
    done = subprocess.run(
        [sys.executable, ROOT / "examples/voice/demo.py", missing],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.endswith(f"error: [Errno 2] No such file or directory: '{missing}'\n")
    assert not list(tmp_path.iterdir())
