"""What the README says first must work as it stands: its pipeline, its curl line, its Python, its picture."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from click.testing import CliRunner

from stage_runtime import cli
from stage_runtime.processes.local import LocalOptions, LocalPipeline
from tests.docs.blocks import ROOT, blocks

ADDRESS = "localhost:8000"


async def output_of(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, env={**os.environ, "no_proxy": "*"})
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return printed.decode()


async def as_curl(line: str) -> httpx.Response:
    """What curl would do with ``curl URL -H HEADER -d BODY``; a clean machine has none."""
    _, url, dash_h, header, dash_d, body = shlex.split(line)
    assert (dash_h, dash_d) == ("-H", "-d")
    name, _, value = header.partition(": ")
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(f"http://{url}", headers={name: value}, content=body)


def command(start: str) -> str:
    """The one shell line of the README that begins so."""
    [line] = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line.startswith(start)]
    return line


async def test_the_pipeline_of_the_readme_answers_its_curl_line_and_its_python() -> None:
    [pipeline], [program] = blocks("README.md", "yaml"), blocks("README.md", "python")
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        file = Path(folder) / "pipeline.yaml"
        file.write_text(pipeline)
        base = [f"endpoints.basePath={folder}"]
        async with LocalPipeline(file, overrides=base, options=LocalOptions(port=0)) as running:
            host = running.url.removeprefix("http://")
            answer = await as_curl(command("curl ").replace(ADDRESS, host))
            assert answer.json()["results"] == {"shout": {"type": "text", "text": "HELLO!! THERE!!"}}
            printed = await output_of(sys.executable, "-c", program.replace(ADDRESS, host))
            assert printed == "HELLO!! THERE!!\n"
            assert f"# {printed.strip()}" in program


def test_the_picture_of_the_readme_is_what_omni_plan_draws() -> None:
    """`omni plan -f examples/voice/pipeline.yaml -o svg > docs/pictures/voice.svg` makes it anew."""
    drawn = CliRunner().invoke(cli.main, ["plan", "-f", str(ROOT / "examples/voice/pipeline.yaml"), "-o", "svg"])
    assert drawn.exit_code == 0, drawn.output
    assert (ROOT / "docs/pictures/voice.svg").read_text() == drawn.output


def test_the_commands_of_the_readme_exist() -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    assert {"demo", "test", "hops"} <= targets
    assert command("make demo") and command("make test")
    assert (ROOT / "benchmarks/hops.py").exists()
