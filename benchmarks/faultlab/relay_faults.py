"""Faults of one relay between two pods, while transfers are under way in both directions.

The driver is the control plane: it passes facts, metadata and releases on, and tells the survivor of a death.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Final, Literal

import msgspec

from benchmarks.faultlab.relay_ground import End, ground, within
from stage_runtime.transfers.receiving import STALLED_S

Fault = Literal["kill", "freeze", "link", "vanish", "restart"]

RELAYS: Final = ("nixl", "mooncake", "nccl")
FAULTS: Final[tuple[Fault, ...]] = ("kill", "freeze", "link", "vanish", "restart")
NOTICED_S: Final[dict[str, float]] = {"kill": 0.1, "freeze": 4.0, "link": 5.0, "vanish": 5.0, "restart": 0.1}
#: Seconds without progress, of a get whose sender is hurt: this driver's own, as a member's heartbeats. A stage waits
#: longer (`transfers.receiving.STALLED_S`), for a slow sender is not a dead one.
DEADLINE_S: Final = 3.0
LATE: Final = 32 << 20  # given up on its way
KEPT: Final = 8  # transfers beside it
LARGE: Final = 96 << 20
SLOW_PER_S: Final = 200_000  # bytes, of a link
SLOW_NBYTES: Final = 3 << 20  # over it
STOPS_MOST: Final = 50  # tries to stop a process while it sends
DRAINED_S: Final = 1.0  # what is in the kernel's buffers has come, also where the relay's thread runs late
REUSED: Final = "its slot was reused"  # so a get fails where late bytes have overwritten its header


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    relay: str
    fault: str
    transfers: int  #: Checked byte by byte.
    noticed_s: float  #: Time until the waiting side knew; of a kill, since the signal.
    reason: str
    wrong: int  #: Bytes that were somebody else's.
    held: dict[str, int]  #: Memory that a survivor did not get back.
    exits: dict[str, int]  #: Exit codes of those that were not killed.
    #: Time until the kernel had closed the connections of the killed process: nobody can know before.
    closed_s: float = 0.0

    def broken(self, *, noticed: bool = True, slack_s: float = 0.0) -> list[str]:
        """The promises that do not hold. noticed: also how fast, with so much more time."""
        found = []
        if self.wrong:
            found.append(f"{self.wrong} bytes landed in memory of another transfer")
        if self.held:
            found.append(f"not given back: {self.held}")
        if any(self.exits.values()):
            found.append(f"exit codes {self.exits}")
        limit = NOTICED_S.get(self.fault)
        noticed_s = self.noticed_s - self.closed_s
        if noticed and limit is not None and noticed_s > limit + slack_s:
            found.append(f"noticed after {noticed_s:.2f} s, not {limit + slack_s} s")
        return found


async def under_way(near: End, number: int, relay: str) -> None:
    """Waits until bytes of the get come, or it is over."""

    async def begun() -> None:
        while not near.ends[number].done() and not (await near.ask(do="stats"))[f"{relay}_incoming_bytes"]:
            await asyncio.sleep(0)

    await within(f"first bytes of get {number} at {near.name}", begun())


async def stopped_on_the_way(far: End, near: End, relay: str) -> int:
    """Stop the far process while it sends. Returns: the number of the get that is on its way, and stays there."""
    for _ in range(STOPS_MOST):
        coming = await near.fetch(far, LARGE, 2, deadline_s=DEADLINE_S)
        await under_way(near, coming, relay)
        os.kill(far.pid, signal.SIGSTOP)
        done, _ = await asyncio.wait({near.ends[coming]}, timeout=DRAINED_S)
        if not done:
            return coming
        os.kill(far.pid, signal.SIGCONT)  # all of it was on its way already
        await _checked(near, coming, 2)  # both arenas have no room for two of them
    raise AssertionError(f"{LARGE} bytes came before their sender was stopped, {STOPS_MOST} times")


async def hurt(relay: str, fault: Fault) -> Outcome:
    """A fault of the far process while it sends, and is sent to; a third process is given the memory meanwhile."""
    async with ground(relay) as land:
        near = await land.start("near", "near")
        other = await land.start("far", "other")
        far = await land.start("far", "far")
        for sender, receiver in ((far, near), (near, far), (other, near)):  # the ways are open
            await _checked(receiver, await receiver.fetch(sender, 1 << 20, 1), 1)
        await far.fetch(near, LARGE, 2, deadline_s=DEADLINE_S)
        coming = await stopped_on_the_way(far, near, relay)
        begun, closed_s = time.monotonic(), 0.0
        match fault:
            case "kill" | "restart":
                os.kill(far.pid, signal.SIGKILL)
                await far.cut_off()
                closed_s = time.monotonic() - begun
                await near.ask(do="forget", peer="far")
                await within("end of far's output", far.dead.wait())
            case "freeze":
                pass
            case "link":
                land.pods.cut()
                os.kill(far.pid, signal.SIGCONT)
            case "vanish":  # a machine without power: nothing refuses, and nothing ever answers
                land.pods.cut()
                os.kill(far.pid, signal.SIGKILL)
                await within("end of far's output", far.dead.wait())
        end = await near.end_of(coming)
        noticed_s = max(end["at"] - begun, 0.0)
        reason = end.get("reason", "")
        wrong = transfers = 0
        if fault == "restart":
            del land.ends["far"]
            await land.held(near)
            far = await land.start("far", "far")
            wrong += await _checked(near, await near.fetch(far, 8 << 20, 3), 3)
        elif fault == "freeze":
            await near.ask(do="forget", peer="far")
            numbers = [await near.fetch(other, 8 << 20, 10 + one) for one in range(6)]
            for number in numbers:
                await near.end_of(number)
            os.kill(far.pid, signal.SIGCONT)
            await far.ask(do="forget", peer="near")
            await land.calm(near)
            for one, number in enumerate(numbers):
                wrong += await _checked(near, number, 10 + one)
                transfers += 1
        elif fault == "link":
            for here, name in ((near, "far"), (far, "near"), (near, "other"), (other, "near")):
                await here.ask(do="forget", peer=name)
            land.pods.mend()
            for here, there in ((near, far), (far, near), (near, other), (other, near)):
                assert await here.ask(do="open", peer=there.name, facts=await there.ask(do="facts"))
            wrong += await _again(near, far, 4)
        elif fault == "vanish":
            await near.ask(do="forget", peer="far")
        transfers += fault in ("restart", "link")
        exits = await land.close("other", "far")
        for name in exits:
            await near.ask(do="forget", peer=name)
        held = await land.held(near)
        exits |= await land.close("near")
    return Outcome(
        relay=relay,
        fault=fault,
        transfers=transfers,
        noticed_s=noticed_s,
        closed_s=closed_s,
        reason=reason,
        wrong=wrong,
        held=held,
        exits=exits,
    )


async def slow(relay: str) -> Outcome:
    """A link over which a transfer takes far longer than a get waits for its next bytes: nothing is given up."""
    async with ground(relay) as land:
        land.pods.slow(SLOW_PER_S)
        near, far = await land.start("near", "near"), await land.start("far", "far")
        begun = time.monotonic()
        wrong = await _checked(near, await near.fetch(far, SLOW_NBYTES, 1, deadline_s=STALLED_S), 1)
        took_s = time.monotonic() - begun
        assert took_s > STALLED_S, f"the link was not slow: {took_s:.1f} s"
        exits = await land.close("far")
        await near.ask(do="forget", peer="far")
        held = await land.held(near)
        exits |= await land.close("near")
    return Outcome(
        relay=relay, fault="slow", transfers=1, noticed_s=0.0, reason="", wrong=wrong, held=held, exits=exits
    )


async def give_up_often(relay: str, transfers: int, *, careless: bool = False, seed: int = 1) -> Outcome:
    """Gets that are given up while their sender is frozen: what it still sends comes when other gets have the memory.

    careless: without quarantine, until that has done harm.
    """
    chance = random.Random(seed)
    async with ground(relay) as land:
        near = await land.start("near", "near", *(["careless"] if careless else []))
        other = await land.start("far", "other")
        far = await land.start("far", "far")
        done = wrong = 0
        while done < transfers and not (careless and wrong):
            size = chance.choice((1 << 20, 2 << 20, 4 << 20))
            marks = [1 + (done + one) % 200 for one in range(KEPT)]
            puts = [await other.put(near, size, mark) for mark in marks]
            late = await near.fetch(far, LATE, 255, "late")
            if careless or chance.random() < 0.5:
                await under_way(near, late, relay)
            else:
                await asyncio.sleep(chance.uniform(0, 0.02))  # it is stopped anywhere, before its first byte, too
            os.kill(far.pid, signal.SIGSTOP)
            await near.ask(do="give_up", request="late")
            kept = [(await near.get(other, metadata), mark) for metadata, mark in zip(puts, marks, strict=True)]
            for number, _ in kept:
                await near.end_of(number)
            os.kill(far.pid, signal.SIGCONT)
            if (await near.end_of(late))["event"] == "here":  # it was too late to give it up
                wrong += await _checked(near, late, 255)
            # The next transfer comes behind the one that was given up, so all of that one is here then.
            behind = await near.fetch(far, 4096, 254)
            for number, mark in ((behind, 254), *kept):
                if careless and (await near.end_of(number))["event"] != "here":  # late bytes are in its slot's header
                    wrong += REUSED in (await near.end_of(number))["reason"]
                else:
                    wrong += await _checked(near, number, mark)
            done += len(kept) + 1
            near.ends.clear()
        held = await land.held(near)
        exits = await land.close("other", "far", "near")
    return Outcome(
        relay=relay,
        fault="careless" if careless else "given up",
        transfers=done,
        noticed_s=0.0,
        reason="",
        wrong=wrong,
        held=held,
        exits=exits,
    )


async def _checked(near: End, number: int, mark: int) -> int:
    """How many bytes of a get are wrong. Raises: AssertionError: it failed."""
    end = await near.end_of(number)
    assert end["event"] == "here", end
    return int(await near.ask(do="wrong", number=number, mark=mark))


async def _again(near: End, far: End, mark: int) -> int:
    """The same as `_checked`, over a connection that is made anew: a first try may still find the old one broken."""
    for _ in range(10):
        number = await near.fetch(far, 8 << 20, mark, deadline_s=DEADLINE_S)
        if (await near.end_of(number))["event"] == "here":
            return await _checked(near, number, mark)
    raise AssertionError("the way does not come back")
