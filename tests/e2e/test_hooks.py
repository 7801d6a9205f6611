"""A user's function that raises, or gives what cannot be encoded, fails its own request and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import APART, TOGETHER, Client, at_rest, diamond, eventually, running

#: The failure that a request asks for -> the stage and hook that the client's error must name.
HOOKS = {
    "take": ("take", "run"),
    "route_fn": ("take", "routeFn"),
    "left": ("left", "run"),
    "wait_for_fn": ("join", "waitForFn"),
    "merge_fn": ("join", "mergeFn"),
    "join": ("join", "run"),
    "write": ("write", "run"),
    "write in mid-stream": ("write", "run"),
    "project_payload[speak]": ("write", "projectPayload.speak"),
    "stream_done_to_fn": ("write", "streamDoneToFn"),
    "speak": ("speak", "run"),
    "terminal_stages_fn": (None, "terminalStagesFn"),
}


@pytest.mark.proves("function-raises")
@pytest.mark.parametrize("hook", HOOKS)
async def test_a_hook_that_raises_fails_its_request_with_its_place_and_no_other(
    hook: str, shared: LocalPipeline, client: Client
) -> None:
    before = shared.pids()
    broken, *others = await asyncio.gather(
        client.ask("this one fails", fail=hook), *(client.answer(f"other {index}") for index in range(8))
    )
    stage, name = HOOKS[hook]
    error = broken["error"]
    assert (error["code"], error["stage"], error.get("hook")) == ("stage_failed", stage, name)
    assert f"Broken: {hook} fails on request" in error["message"]
    assert [other["text"] for other in others] == [f"other {index}" for index in range(8)]
    assert shared.pids() == before
    await at_rest(client)


async def test_a_hook_that_fails_after_the_first_chunk_ends_the_stream_with_the_error(client: Client) -> None:
    first, (name, last) = await client.streamed("one two three", fail="speak in mid-stream", slow=0.05)
    assert (first[0], first[1]["data"], name) == ("chunk", "ONE", "error")
    assert last["error"]["code"] == "stage_failed"
    assert (last["error"]["stage"], last["error"]["hook"]) == ("speak", "run")


@pytest.mark.long
@pytest.mark.proves("unsendable-value")
@pytest.mark.parametrize(
    ("processes", "relay"), [(TOGETHER, "auto"), (APART, "tcp")], ids=["inside one process", "by tcp"]
)
async def test_a_value_that_cannot_travel_is_refused_at_its_sender_with_its_path(
    processes: dict[str, str], relay: str, base: Path
) -> None:
    """The same on every transport, or a pipeline would break when it is placed otherwise."""
    async with running(diamond(processes, relay_backend=relay), base) as pipeline, Client(pipeline.url) as client:
        await refuses(client)


async def test_a_value_that_cannot_travel_is_refused_by_shared_memory_too(client: Client) -> None:
    await refuses(client)


async def refuses(client: Client) -> None:
    for size in (4, 1 << 20):
        error = (await client.ask("a b", odd="left", size=size))["error"]
        assert (error["code"], error["stage"]) == ("stage_failed", "left")
        assert error["message"].startswith("payload.data['nested'][0]['value']: "), error
        error = (await client.ask("a b", odd="chunk", size=size))["error"]
        assert (error["code"], error["stage"]) == ("stage_failed", "write")
        assert error["message"].startswith("chunk.data['value']: "), error
        assert (await client.answer("and on"))["text"] == "and on"


@pytest.mark.long
@pytest.mark.proves("written-input")
async def test_debug_values_names_the_stage_that_wrote(base: Path) -> None:
    """And without a writer it names nobody: the positive control. One of the two receivers reads shared memory."""
    stages = [
        StageConfig(name="source", process="p", factory="diamond_stages:torch_source", next=["quiet", "loud"]),
        StageConfig(
            name="quiet",
            process="p",
            factory="diamond_stages:torch_writer",
            factory_args={"name": "quiet"},
            terminal=True,
        ),
        StageConfig(
            name="loud",
            process="q",
            factory="diamond_stages:torch_writer",
            factory_args={"name": "loud"},
            terminal=True,
        ),
    ]
    log = base / "log"
    async with running(PipelineConfig(stages=stages), base, debug_values=True) as pipeline:
        async with Client(pipeline.url) as client:
            assert "results" in await client.ask("nobody writes")
            assert "wrote into" not in log.read_text()
            assert "results" in await client.ask("loud writes", write="loud")
            await eventually(lambda: "stage 'loud' wrote into payload.data['tensor']" in log.read_text())
            assert "stage 'quiet' wrote" not in log.read_text()
