"""The cost of faults: each member killed, frozen, cut off, parted, drained, restarted and scaled, under steady load.

    python -m benchmarks.faults [--networked] [--fault NAME …] [--member NAME …] [--replicas N …] [--all] [--json FILE]

Half of the requests stream. The client retries nothing and writes down each request's one end. Cuts need root
(network namespaces); there everything goes by TCP and CURVE, elsewhere by Unix sockets and shared memory.

    python -m benchmarks.faults --relay nixl|mooncake|nccl [--transfers 10000] [--json FILE]

One relay between two pods: a peer killed, frozen, cut off, gone without a word and restarted on the way, then gets that
are given up, with quarantine (no byte may be wrong) and without (some must be). A kill is "closed" when the kernel
had closed the killed process's connections; it is to be noticed within 0.1 s of that.
Exit code 1: a promise was broken; each is listed below its row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.faultlab import experiments, graph, network, relay_faults
from benchmarks.faultlab.experiments import Outcome
from stage_runtime.processes.one_machine.local import LocalPipeline

HEAD = (
    f"{'fault':8} {'target':9} {'repl.':>5} {'requests':>8} {'retried':>7} {'lost':>4} {'wrong':>5} {'healthy':>9}  "
    "failed by code (of them not streamed)"
)
CONTROL_TRANSFERS = 200  # without quarantine
ROWS = (*experiments.FAULTS, "scale")
SCALED = ("entry", "consumer")  # the others with --all


def row(outcome: Outcome) -> str:
    failed = ", ".join(f"{code} {count}" for code, count in sorted(outcome.failed.items())) or "-"
    more = f" ({outcome.unstreamed_failed})" if outcome.failed else ""
    served = f"; served by each: {outcome.served}" if outcome.served else ""
    return (
        f"{outcome.fault:8} {outcome.target:9} {outcome.replicas:5} {outcome.requests:8} {outcome.retried:7} "
        f"{outcome.lost:4} {outcome.wrong:5} {outcome.seconds_to_healthy:7.2f} s  {failed}{more}{served}"
    )


async def table(arguments: argparse.Namespace) -> list[Outcome]:
    found: list[Outcome] = []
    print(HEAD)
    for fault in arguments.fault or [one for one in ROWS if arguments.networked or one not in experiments.NETWORKED]:
        for replicas in arguments.replicas or (1, 2):
            if (fault, replicas) in (("drain", 1), ("restart", 2), ("scale", 2)):
                continue  # one alone cannot drain unnoticed: there `restart` brings another first
            async for outcome in rows(fault, replicas, arguments):
                found.append(outcome)
                print(row(outcome), flush=True)
                for promise in outcome.broken():
                    print(f"    broken: {promise}", flush=True)
    return found


async def rows(fault: str, replicas: int, arguments: argparse.Namespace) -> AsyncIterator[Outcome]:
    members = arguments.member or (SCALED if fault == "scale" and not arguments.all else graph.MEMBERS)
    async with running(fault, replicas, arguments) as pipeline:
        await experiments.warm(pipeline)
        for member in members:
            if fault == "scale":
                assert isinstance(pipeline, LocalPipeline)
                yield await experiments.resize(pipeline, member, count=arguments.requests)
            else:
                yield await experiments.hurt(pipeline, fault, member, replicas=replicas)


@contextlib.asynccontextmanager
async def running(
    fault: str, replicas: int, arguments: argparse.Namespace
) -> AsyncIterator[LocalPipeline | network.NetPipeline]:
    start = experiments.networked if fault in experiments.NETWORKED else experiments.local
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        try:
            async with start(replicas, Path(folder)) as pipeline:
                yield pipeline
        finally:
            log = Path(folder) / "log"
            if arguments.logs and log.exists():
                Path(arguments.logs, f"{fault}-{replicas}.log").write_bytes(log.read_bytes())


async def relay_table(
    relay: str,
    transfers: int,
    file: str | None,
    *,
    hurt: Callable[..., Awaitable[relay_faults.Outcome]] = relay_faults.hurt,
    slow: Callable[..., Awaitable[relay_faults.Outcome]] = relay_faults.slow,
    give_up_often: Callable[..., Awaitable[relay_faults.Outcome]] = relay_faults.give_up_often,
) -> int:
    """Print what each fault did to a relay, and write it to ``file``. Returns: the exit code."""
    print(f"{'relay':9} {'fault':9} {'closed':>9} {'noticed':>9} {'checked':>8} {'wrong bytes':>12}  reason")
    found, broken = list[relay_faults.Outcome](), list[str]()
    try:
        for fault in relay_faults.FAULTS:
            found.append(await hurt(relay, fault))
            broken += _printed(found[-1], found[-1].broken())
        found.append(await slow(relay))
        broken += _printed(found[-1], found[-1].broken())
        found.append(await give_up_often(relay, transfers))
        broken += _printed(found[-1], found[-1].broken())
        found.append(await give_up_often(relay, min(transfers, CONTROL_TRANSFERS), careless=True))
        broken += _printed(found[-1], [] if found[-1].wrong else ["without quarantine nothing was found"])
    finally:
        _write(file, found)
    return 1 if broken else 0


def _write(file: str | None, found: Sequence[msgspec.Struct]) -> None:
    if file:
        Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(found)))


def _printed(found: relay_faults.Outcome, broken: list[str]) -> list[str]:
    print(
        f"{found.relay:9} {found.fault:9} {found.closed_s:7.2f} s {found.noticed_s:7.2f} s "
        f"{found.transfers:8} {found.wrong:12}  {found.reason or '-'}",
        flush=True,
    )
    for promise in broken:
        print(f"    broken: {promise}", flush=True)
    return broken


def read(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networked", action="store_true", help="cut the network, too; needs root")
    parser.add_argument("--fault", action="append", choices=ROWS, help="only this one")
    parser.add_argument("--member", action="append", choices=graph.MEMBERS, help="only this one")
    parser.add_argument("--replicas", action="append", type=int, choices=(1, 2), help="only so many")
    parser.add_argument("--all", action="store_true", help="scale every member, not the entry and the consumer alone")
    parser.add_argument("--requests", type=int, default=5000, help="sent while a member is scaled")
    parser.add_argument("--json", help="write the outcomes there")
    parser.add_argument("--relay", choices=relay_faults.RELAYS, help="this relay alone, between two pods; needs root")
    parser.add_argument("--transfers", type=int, default=10_000, help="of --relay, beside gets that are given up")
    parser.add_argument("--logs", help="keep the processes' logs in this folder")
    arguments = parser.parse_args(words)
    needs = arguments.networked or arguments.relay
    if (needs or experiments.NETWORKED.intersection(arguments.fault or ())) and not network.possible():
        parser.error("cuts need root, and Debian's iproute2")
    return arguments


def main() -> int:
    arguments = read()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # processes and namespaces end with it
    if arguments.relay:
        return asyncio.run(relay_table(arguments.relay, arguments.transfers, arguments.json))
    found = asyncio.run(table(arguments))
    _write(arguments.json, found)
    return 1 if any(outcome.broken() for outcome in found) else 0


if __name__ == "__main__":
    sys.exit(main())
