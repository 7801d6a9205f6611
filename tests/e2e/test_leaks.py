"""Clients that go away leave nothing behind: no slot, no credit, no descriptor, no thread, no memory."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest

from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import PATIENCE_S, Client, at_rest, eventually, held, resident, shared_files, under_way

MIB = 1 << 20


async def test_a_client_that_hangs_up_before_the_answer_aborts_its_request_downstream(client: Client) -> None:
    tasks = asyncio.create_task(client.ask("a b", nap=3600, size=MIB))

    async def at_the_stage() -> bool:
        return "front.running" in await under_way(client)

    await eventually(at_the_stage)
    tasks.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await tasks
    await at_rest(client)  # an hour of nap was cut short


@pytest.mark.proves("client-disconnects")
async def test_a_client_that_hangs_up_in_mid_stream_aborts_its_request_downstream(client: Client) -> None:
    await client.cut(" ".join(["word"] * 400), after=3, slow=0.5, size=MIB)
    await at_rest(client)


@pytest.mark.proves("client-disconnects")
async def test_deleting_a_request_ends_it_everywhere_and_its_client_gets_an_error(
    shared: LocalPipeline, client: Client
) -> None:
    tasks = asyncio.create_task(client.post({"inputs": {"text": "a b", "nap": 3600}}, request_id="doomed"))
    async with httpx.AsyncClient(base_url=shared.url, timeout=PATIENCE_S) as other:

        async def known() -> bool:
            return (await other.get("/v1/requests/doomed")).status_code == 200

        await eventually(known)
        assert (await other.delete("/v1/requests/doomed")).json() == {"id": "doomed", "cancelled": True}
        answer = await tasks
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        assert (await other.delete("/v1/requests/doomed")).json() == {"id": "doomed", "cancelled": False}
    await at_rest(client)


@pytest.mark.proves("deadline")
async def test_a_deadline_ends_a_request_everywhere(client: Client) -> None:
    answer = await client.post({"inputs": {"text": "a b", "nap": 3600}, "timeout": 0.3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    await at_rest(client)


@pytest.mark.long
@pytest.mark.proves("client-disconnects")
@pytest.mark.timeout(600)  # 20 s on a machine that does nothing else
async def test_a_thousand_aborts_of_a_mebibyte_leave_nothing(shared: LocalPipeline, client: Client) -> None:
    inputs = {"text": " ".join(["word"] * 40), "slow": 0.02, "size": MIB // 16, "pad": "x" * MIB}
    body = json.dumps({"inputs": inputs}).encode()
    patience_s = 0.15

    async def abort(leaving: Client, number: int) -> None:
        """Hang up at another point each time: in the body, at the entry, in the stream."""
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(patience_s + 0.008 * number):
                await leaving.send(body)

    async def outcomes() -> tuple[float, float]:
        """Requests that were cancelled, and those that were answered to the end."""
        found = await client.metrics()
        cancelled, completed = (f"omnipipeline_requests_total{{{each}}}" for each in ("cancelled", "completed"))
        return found.get(cancelled, 0.0), found.get(completed, 0.0)

    async def many(count: int) -> None:
        """Cancel until so many have hit a request under way: on a busy machine some come before the body does, and with
        more patience than the answer takes none does."""
        nonlocal patience_s
        hit, completed = await outcomes()
        wanted = hit + count
        async with Client(shared.url, connections=40) as leaving:
            while hit < wanted:
                before, completed_before = hit, completed
                await asyncio.gather(*(abort(leaving, number) for number in range(40)))
                hit, completed = await outcomes()
                if hit - before < 20:
                    patience_s *= 1 / 1.5 if completed - completed_before > 10 else 1.5
        await at_rest(client)

    await many(150)
    pids = shared.pids()
    before, files, memory = held(pids), shared_files(pids), resident(pids)
    await many(1000)
    assert shared.pids() == pids

    async def as_before() -> bool:
        """No more than before, when the last connections may still have been open."""
        now = held(pids)
        within = all(now[name][kind] <= before[name][kind] for name in before for kind in (0, 1))
        return within and shared_files(pids) <= files

    await eventually(as_before, what=lambda: f"{before} and {files} before, {held(pids)} and {shared_files(pids)} now")

    def grown() -> dict[str, int]:
        return {name: (size - memory[name]) // MIB for name, size in resident(pids).items()}

    async def given_back() -> bool:
        return max(grown().values()) < 200  # allocators keep something; requests that stay would be 1,000 MiB

    await eventually(given_back, what=lambda: f"MiB of growth by 1,000 requests of 1 MiB: {grown()}")


async def test_a_kept_view_of_a_payload_is_seen_as_a_slot_that_is_held(client: Client) -> None:
    """The positive control of every `at_rest` here."""
    await client.answer("a b", keep=True, size=MIB)

    async def still_held() -> bool:
        """The request is over, by all that is said of it, and its slot is not free."""
        found = await under_way(client)
        over = not any(name == "in_flight" or name.endswith((".waiting", ".running", ".bound")) for name in found)
        return over and "side.relay_shm_pinned_transfers" in found

    await eventually(still_held)
    await client.answer("a b", keep=False, size=MIB)
    await at_rest(client)
