"""LiteLLM, LangChain, OpenAI's Agents SDK and its realtime client use a pipeline as they use OpenAI.

They are installed into an environment of their own: their versions of common packages are not this repository's.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from stage_runtime.wire.values import Text, ToolCall, Usage
from tests.web.running import ALL, start
from tests.web.scripted_manager import Event, ScriptedHandle, chunk

SCRIPT = Path(__file__).with_name("other_clients_script.py")
PACKAGES = {
    "litellm": "litellm==1.110.2",
    "langchain": "langchain-openai==1.7.4",
    "agents": "openai-agents==0.24.0",
    "realtime": "openai[realtime]==3.52.0",
}
WITHIN_S = 1800

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(WITHIN_S + 60)]


async def answering(handle: ScriptedHandle) -> AsyncIterator[Event]:
    """Says hello; calls the tool that it is offered, and says what that gave."""
    messages = handle.request.messages()
    if messages[-1]["role"] == "tool":
        yield chunk(Text("it is "))
        yield chunk([Text(messages[-1]["content"][0]["text"]), Usage(5, 3)], index=1)
    elif handle.request.params.get("tools"):
        yield chunk([ToolCall("call_1", "weather", "{}"), Usage(5, 4)])
    else:
        yield chunk(Text("hel"))
        yield chunk([Text("lo"), Usage(5, 2)], index=1)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("clients") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=WITHIN_S)
    install: list[str | Path] = [folder / "bin/python", "-m", "pip", "install", "-q", *PACKAGES.values()]
    subprocess.run(install, check=True, timeout=WITHIN_S)
    yield folder / "bin/python"


@pytest.mark.parametrize("client", PACKAGES)
async def test_a_client_that_nobody_here_wrote_is_served(client: str, python: Path) -> None:
    settings = msgspec.structs.replace(ALL, accepts=frozenset({"tools", "response_format", "n"}))
    async with start(answering, settings) as running:
        process = await asyncio.create_subprocess_exec(
            python, SCRIPT, client, running.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(WITHIN_S):
            output, _nothing = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")[-8000:]
