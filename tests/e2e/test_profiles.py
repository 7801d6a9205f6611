"""Profiles of real pipelines, over HTTP: every hop is paired, every stage answers, nothing ends serving."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import signal
import tarfile
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import Profiling
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import APART, PATIENCE_S, TOGETHER, Client, diamond, eventually, running

WORDS = "the quick brown fox"
EDGES, STREAMS = 6, 2  # of the diamond: payload edges, edges with a chunk for each word (one to the client)
STAGES = {*APART, "coordinator"}
#: Each process that takes a trace imports torch.
HALVES = {name: "front" if name in ("take", "right") else "back" for name in APART}


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Post as curl -d does: without a word about JSON."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    return await http.post(path, content=json.dumps(body or {}), headers=headers)


def states(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {each["stage"]: each["state"] for each in answer.json()["stages"]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def apart() -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(
            diamond(), Path(folder), environ={"OMNI_PROFILE_ROOT": str(Path(folder, "profiles"))}
        ) as pipeline:
            yield pipeline


async def test_every_hop_of_every_request_is_paired(apart: LocalPipeline) -> None:
    await hops_are_paired(apart.url, APART)


async def test_every_hop_inside_one_process_is_paired(refusing_pipeline: str) -> None:
    await hops_are_paired(refusing_pipeline, TOGETHER)


async def hops_are_paired(url: str, processes: dict[str, str]) -> None:
    async with Client(url) as client, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        await client.answer("before the run")
        started = await post(http, "/start_request_profile", {"run_id": "demo"})
        assert states(started) == dict.fromkeys(STAGES, "started")
        assert started.json()["complete"]
        await asyncio.gather(*(client.answer(WORDS, size=size) for size in (4, 1 << 20) for _ in range(10)))
        stopped = await post(http, "/stop_request_profile")
        assert states(stopped) == dict.fromkeys(STAGES, "stopped")
        await client.answer("after the run")
        report = (await http.get("/profiles/demo/report")).json()
        archive = await http.get("/profiles/demo")
        shown = await http.get("/profiles/demo/report?format=html")
        runs = (await http.get("/profiles")).json()["runs"]
    hops = Counter[str]()
    for each in report["hop_breakdown"]:
        hops[each["kind"]] += each["count"]
    count = len(WORDS.split())
    assert report["request_count"] == 20
    assert hops == {"payload": 20 * EDGES, "stream": 20 * STREAMS * count}
    assert report["unpaired_hops"] == {}
    assert (report["dropped_count"], report["unreadable_lines"]) == (0, 0)
    assert {each["stage"] for each in report["stage_breakdown"]} == STAGES
    assert {each["complete"] for each in report["processes"]} == {True}
    for each in report["timeline"]:
        names = [event["event_name"] for event in each["events"] if event["event_name"] != "relay_released"]
        assert (names[0], names[-1]) == ("request_admission", "terminal_response")
    entered, left = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    released, put, got = Counter[str](), Counter[str](), Counter[str]()
    for each in report["timeline"]:
        for event in each["events"]:
            facts = event["metadata"]
            kinds = {"stage_queue_enter": entered, "stage_queue_leave": left}
            transfers = {"relay_put_end": put, "relay_get_end": got, "relay_released": released}
            if event["event_name"] in kinds:
                kinds[event["event_name"]][event["stage"], facts["kind"]] += 1
                assert facts["depth"] >= 0
            elif event["event_name"] in transfers:
                transfers[event["event_name"]][facts["transfer"]] += 1
                assert (facts["relay"], facts["nbytes"]) == ("shm", 1 << 20)
    payloads = {(stage, "payload"): 20 for stage in APART}
    assert entered == left == {**payloads, ("speak", "chunk"): 20 * count}
    assert bool(put) == (len(set(processes.values())) > 1)
    assert put == got == released
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as files:
        names = files.getnames()
    assert len(names) == 1 + len(set(processes.values()))
    assert all(name.startswith("demo/events_") for name in names)
    assert shown.headers["content-type"].startswith("text/html") and "<svg" in shown.text
    assert ("demo", False) in [(run["run_id"], run["recording"]) for run in runs]


@pytest.mark.nightly  # test_profiled_ranks.py fetches the trace of each process each time; each imports torch
async def test_a_torch_trace_of_every_process_is_written_where_the_template_says(base: Path) -> None:
    root = base / "profiles"
    async with (
        running(diamond(HALVES), base, environ={"OMNI_PROFILE_ROOT": str(root)}) as pipeline,
        Client(pipeline.url) as client,
        httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http,
    ):
        body = {"run_id": "deep", "trace_path_template": str(root / "mine" / "{stage}_{run_id}"), "config": {}}
        assert states(await post(http, "/start_profile", body)) == dict.fromkeys(STAGES, "started")
        await client.answer(WORDS)
        assert states(await post(http, "/stop_profile", {"run_id": "deep"})) == dict.fromkeys(STAGES, "stopped")
        archive = await http.get("/profiles/deep")
        await client.answer(WORDS)
    traces = sorted((root / "mine").glob("*.trace.json.gz"))
    assert len(traces) == 2
    assert all(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] for trace in traces)
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as files:
        assert sum(name.endswith(".trace.json.gz") for name in files.getnames()) == len(traces)


@pytest.mark.proves("profile-faults")
@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        ("/start_profile", {"trace_path_template": "{oops}"}, 400, "{oops} is not a placeholder; there are {run_id}"),
        ("/start_profile", {"trace_path_template": "{stage"}, 400, "trace_path_template: "),
        ("/start_profile", {"trace_path_template": "{stage.__class__}"}, 400, "is not a placeholder"),
        ("/start_profile", {"trace_path_template": "../../{stage}"}, 400, "is not below"),
        ("/start_profile", {"config": {"with_speed": True}}, 400, "config: 'with_speed' is not one of record_shapes"),
        ("/start_profile", {"config": {"with_stack": "yes"}}, 400, "config.with_stack: must be true or false"),
        ("/start_profile", {"enable_torch": "no"}, 400, "enable_torch"),
        ("/start_profile", {"run": "x"}, 400, "unknown field `run`"),
        ("/start_request_profile", {"event_dir": "/etc"}, 400, "event_dir: /etc is not below"),
        ("/start_request_profile", {"event_dir": ""}, 400, "event_dir"),
        ("/start_request_profile", {"run_id": "../x"}, 400, "run_id: '../x' is not"),
        ("/start_request_profile", {"run_id": "x" * 65}, 400, "run_id"),
        ("/start_request_profile", {"max_seconds": 0}, 400, "max_seconds"),
        ("/stop_profile", {"run_id": "never"}, 404, "no profile run 'never' is known here"),
        ("/stop_profile", [1], 400, "object"),
        ("/stop_profile", {"run_id": "../x"}, 400, "run_id: '../x' is not"),
        ("/stop_request_profile", {"run_id": 7}, 400, "run_id"),
        ("/start_profile", {"config": {"with_stack": None}}, 400, "config.with_stack: must be true or false"),
        ("/start_profile", {"config": []}, 400, "config"),
        ("/start_profile", {"trace_path_template": "{}"}, 400, "is not a placeholder"),
        ("/start_profile", {"trace_path_template": "{0}"}, 400, "{0} is not a placeholder"),
        ("/start_profile", {"trace_path_template": "{stage!r}"}, 400, "is not a placeholder"),
        ("/start_profile", {"trace_path_template": "{pid:>9999999}"}, 400, "is not a placeholder"),
        ("/start_profile", {"trace_path_template": "/"}, 400, "is not below"),
        ("/start_profile", {"trace_path_template": "a\0b"}, 400, "is not a path"),
        ("/start_profile", {"trace_path_template": 7}, 400, "trace_path_template"),
        ("/start_profile", {"trace_path_template": "x" * 5000}, 400, "is not a path"),
        ("/start_request_profile", {"event_dir": "../../etc"}, 400, "is not below"),
        ("/start_request_profile", {"event_dir": "a\0b"}, 400, "is not a path"),
        ("/start_request_profile", {"event_dir": ["x"]}, 400, "event_dir"),
        ("/start_request_profile", {"enable_torch": False}, 400, "unknown field `enable_torch`"),
        ("/start_request_profile", {"run_id": ""}, 400, "run_id: '' is not"),
        ("/start_request_profile", {"run_id": "é"}, 400, "run_id"),
        ("/start_request_profile", {"max_seconds": 1e9}, 400, "max_seconds"),
        ("/start_request_profile", {"max_seconds": True}, 400, "max_seconds"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    refusing: httpx.AsyncClient, path: str, body: Any, status: int, expected: str
) -> None:
    answer = await post(refusing, path, body)
    assert answer.status_code == status, answer.text
    assert expected in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def refusing_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of `refusing_pipeline`."""
    return tmp_path_factory.mktemp("refusing") / "profiles"


@pytest.fixture(scope="module")
def refusing_pipeline(refusing_root: Path) -> Any:
    """A pipeline in a loop of its own, that outlives the tests' loops. Each test stops the runs that it starts."""
    loop = asyncio.new_event_loop()
    environ = {"OMNI_PROFILE_ROOT": str(refusing_root)}
    context = running(diamond(TOGETHER), refusing_root.parent, environ=environ)
    pipeline = loop.run_until_complete(context.__aenter__())
    yield pipeline.url
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


@pytest.fixture
async def refusing(refusing_pipeline: str) -> Any:
    async with httpx.AsyncClient(base_url=refusing_pipeline, timeout=PATIENCE_S) as http:
        yield http


async def test_a_second_run_is_refused_and_a_stop_without_a_name_stops_the_first(refusing: httpx.AsyncClient) -> None:
    assert states(await post(refusing, "/start_request_profile", {"run_id": "one"}))["coordinator"] == "started"
    second = await post(refusing, "/start_profile", {"run_id": "two"})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "duplicate_request")
    assert (await post(refusing, "/stop_profile", {})).json()["run_id"] == "one"
    assert set(states(await post(refusing, "/stop_profile", {})).values()) == {"not recording"}


async def test_of_two_starts_at_once_one_records_and_a_run_stopped_twice_says_so(refusing: httpx.AsyncClient) -> None:
    both = await asyncio.gather(*(post(refusing, "/start_request_profile", {"run_id": name}) for name in ("x", "y")))
    assert sorted(each.status_code for each in both) == [200, 409]
    [first] = [each.json()["run_id"] for each in both if each.status_code == 200]
    stops = await asyncio.gather(*(post(refusing, "/stop_profile", {"run_id": first}) for _ in range(2)))
    assert [set(states(each).values()) for each in stops] == [{"stopped"}, {"not recording"}]
    assert [each.json()["complete"] for each in stops] == [True, False]


async def test_runs_without_a_name_have_different_ones(refusing: httpx.AsyncClient) -> None:
    names = []
    for _ in range(3):
        names.append((await post(refusing, "/start_request_profile")).json()["run_id"])
        await post(refusing, "/stop_request_profile")
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"null", b"{", b"\xff", b"[]", b'{"run_id": "a", "run_id": "b"}', b"[" * 9000]
)
async def test_a_body_is_read_or_refused_whatever_it_is(refusing: httpx.AsyncClient, body: bytes) -> None:
    answer = await refusing.post("/stop_request_profile", content=body)
    assert answer.status_code == (200 if body in (b"", b"{}") else 400), answer.text


@pytest.mark.proves("profile-faults")
async def test_a_folder_that_cannot_be_written_is_named_and_requests_are_served(
    refusing: httpx.AsyncClient, refusing_root: Path
) -> None:
    refusing_root.mkdir(exist_ok=True)
    (refusing_root / "taken").write_text("a file where the folder should be")
    answer = await post(refusing, "/start_request_profile", {"event_dir": "taken/events"})
    assert answer.status_code == 503
    assert {each["state"] for each in answer.json()["stages"]} == {"failed"}
    assert all("taken" in each["error"] for each in answer.json()["stages"])
    traced = await post(refusing, "/start_profile", {"trace_path_template": "taken/{stage}"})
    assert states(traced)["coordinator"] == "started"
    assert {each["state"] for each in traced.json()["stages"] if each["stage"] != "coordinator"} == {"failed"}
    assert not traced.json()["complete"]
    async with Client(str(refusing.base_url)) as client:
        await client.answer(WORDS)
    assert states(await post(refusing, "/stop_profile"))["coordinator"] == "stopped"


async def test_no_events_is_an_answer_too(refusing: httpx.AsyncClient) -> None:
    missing = await refusing.get("/profiles/never/report")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (await refusing.get("/profiles/one/report?format=pdf")).status_code in (400, 404)


async def test_a_stage_that_dies_in_the_middle_is_named_and_its_successor_takes_part(apart: LocalPipeline) -> None:
    async with Client(apart.url) as client, httpx.AsyncClient(base_url=apart.url, timeout=PATIENCE_S) as http:
        assert (await post(http, "/start_request_profile", {"run_id": "deaths"})).json()["complete"]
        await client.answer(WORDS)
        [victim] = [pid for name, pid in apart.pids().items() if name.startswith("voice")]
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(30):
            while True:
                answer = await client.post({"inputs": {"text": WORDS, "size": 4}})
                if answer.status_code == 200:
                    break
        stopped = await post(http, "/stop_request_profile", {"run_id": "deaths"})
        assert set(states(stopped).values()) == {"stopped"}
        report = (await http.get("/profiles/deaths/report")).json()
        await apart.ready()
    [dead] = [each for each in report["processes"] if not each["complete"]]
    assert dead["pid"] == victim
    assert len([each for each in report["processes"] if each["file"].startswith("events_speak")]) == 2


async def test_a_pipeline_that_forbids_profiles_takes_none(base: Path) -> None:
    spec = diamond(TOGETHER, profiling=Profiling(enabled=False))
    async with (
        running(spec, base, environ={"OMNI_PROFILE_ROOT": str(base / "profiles")}) as pipeline,
        httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http,
    ):

        async def refused() -> bool:  # the coordinator reads it within a second of its start
            answer = await post(http, "/start_request_profile", {})
            if answer.status_code == 200:
                await post(http, "/stop_request_profile")
                return False
            assert "profiling.enabled is false" in answer.json()["error"]["message"]
            return True

        await eventually(refused)
        again = await post(http, "/start_profile", {})
    assert again.json()["error"]["code"] == "unsupported_endpoint"


@pytest.mark.long
async def test_a_run_that_nobody_stops_ends_by_itself(refusing: httpx.AsyncClient) -> None:
    assert (await post(refusing, "/start_request_profile", {"run_id": "short", "max_seconds": 1})).json()["complete"]

    async def over() -> bool:
        stopped = await refusing.get("/profiles/short/report")
        return {each["complete"] for each in stopped.json()["processes"]} == {True}

    await eventually(over)
    runs = (await refusing.get("/profiles")).json()["runs"]
    assert [run["recording"] for run in runs if run["run_id"] == "short"] == [False]
    assert (await post(refusing, "/start_request_profile", {"run_id": "next"})).json()["complete"]
    assert (await post(refusing, "/stop_request_profile", {"run_id": "next"})).json()["complete"]
