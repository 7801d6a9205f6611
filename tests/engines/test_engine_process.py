"""An engine core in a process of its own, asked by real clients over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from stage_runtime.engines.autoregressive.clients.abstract import UtilityFailed
from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.inproc import InprocClient
from stage_runtime.engines.autoregressive.clients.sync_mp import SyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    ENGINE_CORE_DEAD,
    AddHeader,
    EngineCoreOutputs,
    EngineCoreRequestType,
    Refused,
    UtilityCall,
    UtilityOutput,
    identity,
)
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.errors import ConfigurationError, EngineDeadError, RequestError
from stage_runtime.rules.autoregressive.requests import Hold
from tests.engines.counting_core import BLOCKS, LAUNCHED

PATIENCE_S = 100.0
SLOW, FATAL = 700, 800
LAUNCH = EngineLaunch(factory=LAUNCHED, kwargs={"slow": SLOW, "fatal": FATAL})


def ask(name: str, first: int = 1, count: int = 3, **params: Any) -> EngineCoreRequest:
    chosen = SamplingParams(max_tokens=count, **params)
    return EngineCoreRequest(request_id=name, prompt_token_ids=[first], params=chosen)


class Answers:
    """Gathers what a sync client's engine gives."""

    def __init__(self, client: SyncMPClient | InprocClient) -> None:
        self.client = client
        self.tokens: dict[str, list[int]] = {}
        self.refused: dict[str, tuple[str, str]] = {}

    def until(self, *names: str) -> dict[str, list[int]]:
        """Read until these are over."""
        left = set(names) - set(self.refused)
        while left:
            given = self.client.get_output(PATIENCE_S)
            for output in given.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish is not None:
                    left.discard(output.request_id)
            for one in given.refused:
                self.refused[one.request_id] = (one.code, one.message)
                left.discard(one.request_id)
        return {name: self.tokens[name] for name in names if name in self.tokens}


@pytest.fixture(scope="module")
def shared() -> Iterator[SyncMPClient]:
    """One engine for the tests that leave it as it was."""
    with SyncMPClient(LAUNCH) as client:
        yield client


def test_requests_are_computed_in_another_process_which_says_how_many_blocks_it_has(shared: SyncMPClient) -> None:
    assert shared.num_gpu_blocks == {0: BLOCKS}
    assert shared.call_utility("pid", timeout_s=PATIENCE_S) == shared.pids[0] != os.getpid()
    for index in range(20):
        shared.add_request(ask(f"r{index}", index, 5))
    assert Answers(shared).until(*(f"r{index}" for index in range(20))) == {
        f"r{index}": list(range(index + 1, index + 6)) for index in range(20)
    }
    assert shared.reqs_in_flight == {}


def test_both_clients_of_a_program_without_a_loop_give_the_same_answers(shared: SyncMPClient) -> None:
    inproc = InprocClient(LAUNCH)
    given = []
    for client in (inproc, shared):
        answers = Answers(client)
        for one in (ask("a", 5), ask("b", 5000), ask("c", 7, 2)):
            client.add_request(one)
        given.append((answers.until("a", "b", "c"), answers.refused))
        with pytest.raises(UtilityFailed, match="ValueError: as asked"):
            client.call_utility("fail", timeout_s=PATIENCE_S)
    assert given[0] == given[1] and set(given[0][1]) == {"b"}


def test_a_request_that_fails_its_checks_fails_alone(shared: SyncMPClient) -> None:
    shared.add_request(ask("unknown token", 5000))
    shared.add_request(EngineCoreRequest(request_id="long", prompt_token_ids=[1] * 600, params=SamplingParams()))
    shared.add_request(ask("sound"))
    answers = Answers(shared)
    assert answers.until("unknown token", "long", "sound") == {"sound": [2, 3, 4]}
    assert {name: code for name, (code, _) in answers.refused.items()} == {
        "unknown token": "invalid_request",
        "long": "context_length_exceeded",
    }
    assert "no token 5000" in answers.refused["unknown token"][1]


def test_a_refusal_that_quotes_a_half_of_a_surrogate_pair_fails_its_request_alone(shared: SyncMPClient) -> None:
    """A schema that a client gives as text may have one, which JSON alone can write."""
    schema = r'{"$id": "http://\ud800\u2100/#a"}'
    shared.add_request(ask("half", grammar=Grammar("json_schema", schema, "structured_outputs.json")))
    shared.add_request(ask("sound"))
    answers = Answers(shared)
    assert answers.until("half", "sound") == {"sound": [2, 3, 4]}
    [(code, message)] = answers.refused.values()
    assert code == "invalid_request" and message.startswith(r"structured_outputs.json: netloc '\ud800")


def test_a_request_with_the_id_of_an_aborted_one_is_announced_too() -> None:
    with SyncMPClient(EngineLaunch(factory=LAUNCHED, kwargs={"step_s": 0.05})) as client:
        scheduled: list[str] = []
        client.on_scheduled = lambda requests: scheduled.extend(name for name, _cached in requests)
        client.add_request(ask("a", 1, 400))
        while not scheduled:
            client.get_output(PATIENCE_S)
        client.abort_requests(["a"])
        client.add_request(ask("a", 5, 2))  # the step under way ends after both
        while "a" in client.reqs_in_flight:
            client.get_output(PATIENCE_S)
        assert scheduled == ["a", "a"]


def test_a_request_held_for_remote_kv_is_computed_when_it_is_released(shared: SyncMPClient) -> None:
    shared.add_request(msgspec.structs.replace(ask("held", 5), hold=Hold.REMOTE_KV))
    shared.add_request(ask("other", 1))
    answers = Answers(shared)
    assert answers.until("other") == {"other": [2, 3, 4]}
    assert "held" not in answers.tokens
    shared.release_requests(["held", "never seen"])
    assert answers.until("held") == {"held": [6, 7, 8]}


def test_a_torch_trace_is_written_beside_the_steps(shared: SyncMPClient, tmp_path: Path) -> None:
    path = tmp_path / "mine" / "engine.trace.json.gz"
    shared.call_utility("start_torch_trace", str(path), {"with_stack": False}, timeout_s=PATIENCE_S)
    shared.add_request(ask("traced"))
    assert Answers(shared).until("traced") == {"traced": [2, 3, 4]}
    assert shared.call_utility("stop_torch_trace", timeout_s=PATIENCE_S) == path.name
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert shared.call_utility("stop_torch_trace", timeout_s=PATIENCE_S) is None
    with pytest.raises(UtilityFailed, match="Expected `bool`"):
        shared.call_utility("start_torch_trace", str(path), {"with_stack": "yes"}, timeout_s=PATIENCE_S)


def test_arrays_cross_the_boundary_both_ways(shared: SyncMPClient) -> None:
    rows = np.arange(10_000, dtype=np.float16).reshape(100, 100)
    assert np.array_equal(shared.call_utility("double", rows, timeout_s=PATIENCE_S), rows * 2)
    small, large = shared.call_utility("echo", np.arange(3), np.arange(300_000), timeout_s=PATIENCE_S)
    assert np.array_equal(small, np.arange(3)) and np.array_equal(large, np.arange(300_000))
    for size in (10, 100_000, 1000, 200_000, 5):  # buffers are used again, of any length
        assert np.array_equal(shared.call_utility("zeros", size, timeout_s=PATIENCE_S), np.zeros(size))
        assert shared.call_utility("echo", "x" * size, timeout_s=PATIENCE_S) == ["x" * size]


@pytest.mark.parametrize("method", ["none_such", "unsendable", "__class__"])
def test_a_utility_that_fails_or_is_not_offered_raises_at_its_caller_alone(shared: SyncMPClient, method: str) -> None:
    with pytest.raises(UtilityFailed):
        shared.call_utility(method, timeout_s=PATIENCE_S)
    assert shared.call_utility("echo", 1, timeout_s=PATIENCE_S) == [1]


def test_a_second_request_with_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    with SyncMPClient(LAUNCH) as client:
        client.add_request(msgspec.structs.replace(ask("twice"), hold=Hold.REMOTE_KV))  # until it is released
        with pytest.raises(RequestError) as refused:
            client.add_request(ask("twice"))
        assert refused.value.code == "duplicate_request"
        body = msgspec.msgpack.encode(ask("twice"))  # past the client's own check
        client._send(0, EngineCoreRequestType.ADD, msgspec.msgpack.encode(AddHeader("twice")), body)
        answers = Answers(client)
        answers.until("twice")
        assert answers.refused["twice"][0] == "duplicate_request"
        client.reqs_in_flight["twice"] = 0  # the client has taken the refusal for the first one's
        client.release_requests(["twice"])
        assert Answers(client).until("twice") == {"twice": [2, 3, 4]}


HOSTILE: list[list[bytes]] = [
    [b""],
    [b"\x09"],
    [b"\x00"],
    [b"\x00", b""],
    [b"\x00", b"\xff\xff", b"\x80"],
    [b"\x01", b"\x01"],
    [b"\x01", b"\x91" * 100_000],
    [b"\x02", b"\xc0"],
    [b"\x03", b"\x80", b""],
    [b"\x04", b"\x93\x01\x02\x03"],
    [b"\x05", b"", b"", b""],
    [b"\x00" * 100_000],
    [b"\x00", msgspec.msgpack.encode(AddHeader("x", 7)), msgspec.msgpack.encode(ask("x"))],
    [b"\x03", msgspec.msgpack.encode(UtilityCall(1, "echo", 99)), b"\x90"],
    [b"READY"],
    [ENGINE_CORE_DEAD],
    [b""] * 300,
]


@pytest.mark.parametrize("frames", HOSTILE, ids=lambda frames: repr(frames)[:40])
def test_hostile_bytes_end_one_message_and_not_the_process(shared: SyncMPClient, frames: list[bytes]) -> None:
    shared._input.send([identity(0), *frames])
    shared.add_request(ask("after"))
    assert Answers(shared).until("after") == {"after": [2, 3, 4]}


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x80", msgspec.msgpack.encode(ask("another")), msgspec.msgpack.encode({"request_id": 3})],
    ids=repr,
)
def test_a_request_whose_body_cannot_be_read_is_refused_by_the_name_in_its_header(
    shared: SyncMPClient, body: bytes
) -> None:
    shared.reqs_in_flight["bad"] = 0
    shared._send(0, EngineCoreRequestType.ADD, msgspec.msgpack.encode(AddHeader("bad")), body)
    answers = Answers(shared)
    answers.until("bad")
    assert answers.refused["bad"][0] == "invalid_request" and shared.reqs_in_flight == {}


def test_hostile_bytes_to_a_client_end_one_message(shared: SyncMPClient) -> None:
    intruder = shared._context.connect("PUSH", shared._outputs_of[0])
    for frames in ([b""], [b"\xff" * 99], [ENGINE_CORE_DEAD], [ENGINE_CORE_DEAD, b"??"], [b"\x81\x01\x02", b"x"]):
        intruder.send(frames, block=True)
    intruder.close(linger_ms=1000)
    shared.add_request(ask("after"))
    assert Answers(shared).until("after") == {"after": [2, 3, 4]}


def test_aborted_requests_give_nothing_more_and_all_blocks_come_back() -> None:
    with SyncMPClient(msgspec.structs.replace(LAUNCH, kwargs={"step_s": 0.2})) as client:
        free = client.call_utility("free_blocks", timeout_s=PATIENCE_S)
        names = [f"long {index}" for index in range(10)]
        for name in names:  # the last one is soon through, the others are not while the test waits
            client.add_request(ask(name, 1, 10 if name == names[9] else 450))
        client.abort_requests(names[:9])
        client.abort_requests(names[:9])  # idempotent
        client._send(0, EngineCoreRequestType.ABORT, msgspec.msgpack.encode([*names[:9], "never seen"]))
        answers = Answers(client)
        assert answers.until(names[9]) == {names[9]: list(range(2, 12))}
        assert max((len(answers.tokens.get(name, [])) for name in names[:9]), default=0) < 450
        assert client.call_utility("free_blocks", timeout_s=PATIENCE_S) == free


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"kwargs": {"fails": "raise"}}, "no weights here"),
        ({"kwargs": {"fails": "exit"}}, "exit code 9"),
        ({"kwargs": {"unknown": 1}}, "unknown"),
        ({"factory": "tests.engines.counting_core:none"}, "none"),
        ({"factory": "tests.engines.counting_core:no_engine", "kwargs": {}}, "Served"),
        ({"ready_within_s": 0.0}, "not ready"),
        ({"cores": ((4095,),)}, r"cores=\[4095\]: Invalid argument: this process has [0-9]"),
    ],
)
def test_an_engine_that_cannot_start_fails_the_client_with_its_cause(changes: dict[str, Any], cause: str) -> None:
    before = {one.pid for one in psutil.Process().children()}
    with pytest.raises(ConfigurationError, match=cause):
        SyncMPClient(msgspec.structs.replace(LAUNCH, **changes))
    assert {one.pid for one in psutil.Process().children()} <= before


def test_an_engine_that_fails_ends_every_wait_with_an_engine_dead_error() -> None:
    with SyncMPClient(LAUNCH) as client:
        client.add_request(ask("a", FATAL))
        with pytest.raises(EngineDeadError, match="engine 0"):
            while True:
                client.get_output(PATIENCE_S)
        with pytest.raises(EngineDeadError):
            client.add_request(ask("b"))
        with pytest.raises(EngineDeadError):
            client.call_utility("echo", 1)


@pytest.mark.proves("threads-left-at-exit")
def test_an_engine_that_fails_exits_though_its_factory_has_left_a_thread() -> None:
    kwargs = {**LAUNCH.kwargs, "lingers": True}
    launch = msgspec.structs.replace(LAUNCH, kwargs=kwargs, frozen_after_s=10 * PATIENCE_S)
    with SyncMPClient(launch) as client:
        ended = os.pidfd_open(client.pids[0])
        client.add_request(ask("a", FATAL))
        assert select.select([ended], [], [], PATIENCE_S)[0], "it still runs"
        os.close(ended)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_every_waiter_fails_when_an_engine_is_killed(number: int) -> None:
    async with await AsyncMPClient.start(LAUNCH) as client:
        await client.add_request_async(ask("stuck", SLOW - 1))  # the second step never ends
        assert (await asyncio.wait_for(client.get_output_async(), PATIENCE_S)).outputs[0].new_token_ids == (SLOW,)
        waits = [asyncio.ensure_future(client.get_output_async()) for _ in range(3)]
        waits.append(asyncio.ensure_future(client.call_utility_async("echo", 1)))
        await asyncio.sleep(0)
        os.kill(client.pids[0], number)
        for one in waits:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(one, PATIENCE_S)
        assert client.pids == []
        with pytest.raises(EngineDeadError):
            await client.add_request_async(ask("late"))


async def test_sigterm_finishes_what_is_under_way_and_refuses_what_comes() -> None:
    async with await AsyncMPClient.start(LAUNCH) as client:
        early = msgspec.structs.replace(ask("early", 1, 100), hold=Hold.REMOTE_KV)  # under way until it is released
        await client.add_request_async(early)
        assert await client.call_utility_async("echo", 1) == [1]  # the engine has it
        os.kill(client.pids[0], signal.SIGTERM)
        refused: list[Refused] = []
        asked = 0
        while not refused:
            asked += 1
            await client.add_request_async(ask(f"late {asked}", 500))
            over = False
            while not over:
                given = await asyncio.wait_for(client.get_output_async(), PATIENCE_S)
                refused += given.refused
                over = bool(given.refused) or any(one.finish is not None for one in given.outputs)
        await client.release_requests_async(["early"])
        tokens: list[int] = []
        while len(tokens) < 100:
            given = await asyncio.wait_for(client.get_output_async(), PATIENCE_S)
            tokens += [token for one in given.outputs for token in one.new_token_ids]
        assert tokens == list(range(2, 102)) and refused[0].code == "unavailable"
        with pytest.raises(EngineDeadError):
            while True:
                await asyncio.wait_for(client.get_output_async(), PATIENCE_S)


def test_an_engine_ends_with_a_killed_parent_whatever_it_computes() -> None:
    program = (
        "from stage_runtime.engines.autoregressive.process.launching import EngineLaunch\n"
        "from stage_runtime.engines.autoregressive.clients.sync_mp import SyncMPClient\n"
        "from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest\n"
        "from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams\n"
        f"client = SyncMPClient(EngineLaunch(factory={LAUNCHED!r}, kwargs={{'slow': {SLOW}}}))\n"
        f"request = EngineCoreRequest(request_id='a', prompt_token_ids=[{SLOW}], params=SamplingParams())\n"
        "client.add_request(request); print(client.pids[0], flush=True); client.get_output()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    engine = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    assert select.select([engine], [], [], PATIENCE_S)[0]
    parent.wait()
    parent.stdout.close()
    os.close(engine)


def test_an_engine_process_bears_the_name_of_its_stage() -> None:
    with SyncMPClient(msgspec.structs.replace(LAUNCH, name="thinker")) as client:
        process = Path(f"/proc/{client.pids[0]}")
        assert (process / "comm").read_text() == "engine0:thinker\n"
        assert (process / "cmdline").read_text().endswith("\0thinker\0")


def test_a_client_that_was_not_closed_leaves_no_engine() -> None:
    client = SyncMPClient(LAUNCH)
    engine = os.pidfd_open(client.pids[0])
    client._finalizer()
    assert select.select([engine], [], [], PATIENCE_S)[0]
    os.close(engine)
    client.close()


def test_a_burst_of_requests_waits_for_an_engine_that_has_no_processor(shared: SyncMPClient) -> None:
    names = [f"burst {index}" for index in range(3000)]
    os.kill(shared.pids[0], signal.SIGSTOP)
    try:
        for name in names:
            shared.add_request(ask(name, 1, 1))
    finally:
        os.kill(shared.pids[0], signal.SIGCONT)
    assert Answers(shared).until(*names) == {name: [2] for name in names}


def test_a_request_is_in_flight_until_its_last_output_is_given(shared: SyncMPClient) -> None:
    for name in ("a", "b"):
        before = shared.call_utility("executed", timeout_s=PATIENCE_S)
        shared.add_request(ask(name, 1, 1))
        while shared.call_utility("executed", timeout_s=PATIENCE_S) == before:  # the calls take what comes meanwhile
            pass
    assert set(shared.reqs_in_flight) == {"a", "b"}
    given: list[str] = []
    while shared.reqs_in_flight:
        given += [output.request_id for output in shared.get_output(PATIENCE_S).outputs]
    assert sorted(given) == ["a", "b"]


def test_an_answer_to_a_call_that_was_given_up_ends_no_later_wait(shared: SyncMPClient) -> None:
    os.kill(shared.pids[0], signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            shared.call_utility("echo", "late", timeout_s=0.01)
    finally:
        os.kill(shared.pids[0], signal.SIGCONT)
    assert shared.call_utility("echo", "in time", timeout_s=PATIENCE_S) == ["in time"]  # the late one came before
    with pytest.raises(TimeoutError):
        shared.get_output(0.01)


class Talking(SyncMPClient):
    """A client of an engine that gives outputs without end, and answers no call."""

    def _take(self, on_utility: Callable[[UtilityOutput], None]) -> list[EngineCoreOutputs]:
        super()._take(lambda output: None)
        return [EngineCoreOutputs(refused=(Refused("other", "invalid_request", ""),))]


def test_a_call_ends_at_its_time_whatever_else_the_engine_gives() -> None:
    with Talking(LAUNCH) as client, pytest.raises(TimeoutError):
        client.call_utility("echo", timeout_s=0.01)


def test_waiting_ends_at_its_time(shared: SyncMPClient) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        shared.get_output(0.01)
    assert time.monotonic() >= began + 0.01
