"""What faults cost: SIGKILL, a freeze and a cut network at every member in turn, under load, judged by a ledger.

    python benchmarks/faults.py [--quick] [--fault NAME] [--member NAME] [--replicas N] [--json FILE]

Half of the requests stream. The client retries nothing and writes down each request's one end. Cuts need root
(network namespaces); there everything goes by TCP and CURVE, elsewhere by Unix sockets and shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.faultlab import experiments, graph, network
from benchmarks.faultlab.experiments import Outcome

HEAD = (
    f"{'fault':8} {'target':9} {'repl.':>5} {'requests':>8} {'retried':>7} {'lost':>4} {'healthy':>8}  failed by code"
)


def row(outcome: Outcome) -> str:
    failed = ", ".join(f"{code} {count}" for code, count in sorted(outcome.failed.items())) or "-"
    return (
        f"{outcome.fault:8} {outcome.target:9} {outcome.replicas:5} {outcome.requests:8} {outcome.retried:7} "
        f"{outcome.lost:4} {outcome.seconds_to_healthy:6.2f} s  {failed} (unstreamed: {outcome.unstreamed_failed})"
    )


async def table(arguments: argparse.Namespace) -> list[Outcome]:
    found: list[Outcome] = []
    print(HEAD)
    for replicas in arguments.replicas or (1, 2):
        for fault in arguments.fault or experiments.FAULTS:
            if fault == "cut" and not network.possible():
                print("cut: needs root and network namespaces", file=sys.stderr)
                continue
            start = experiments.networked if fault == "cut" else experiments.local
            with tempfile.TemporaryDirectory(prefix="f-") as folder:
                async with start(replicas, Path(folder)) as pipeline:
                    await experiments.warm(pipeline)
                    for member in arguments.member or graph.MEMBERS:
                        after_s = 7.0 if not arguments.quick else 6.0
                        outcome = await experiments.hurt(pipeline, fault, member, replicas=replicas, after_s=after_s)
                        found.append(outcome)
                        print(row(outcome), flush=True)
                        for problem in (*outcome.faults, *outcome.left):
                            print(f"    {problem}", flush=True)
                if arguments.logs:
                    Path(arguments.logs, f"{fault}-{replicas}.log").write_bytes((Path(folder) / "log").read_bytes())
    return found


async def scaling(arguments: argparse.Namespace) -> None:
    count = 1000 if arguments.quick else 5000
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        async with experiments.local(1, Path(folder)) as pipeline:
            ledger, served = await experiments.resize(pipeline, "consumer", count=count, rate=50.0)
    print(
        f"\nconsumer 1 → 3 → 1 under {count} requests: failed {dict(ledger.failed())}, served {sorted(served.values())}"
    )


async def main(arguments: argparse.Namespace) -> None:
    found = await table(arguments)
    if not arguments.member and not arguments.fault:
        await scaling(arguments)
    if arguments.json:
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(found)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs, fewer requests")
    parser.add_argument("--fault", action="append", choices=list(experiments.FAULTS), help="only this one")
    parser.add_argument("--member", action="append", choices=graph.MEMBERS, help="only this one")
    parser.add_argument("--replicas", action="append", type=int, choices=(1, 2), help="only so many")
    parser.add_argument("--json", help="write the outcomes there")
    parser.add_argument("--logs", help="keep the processes' logs in this folder")
    asyncio.run(main(parser.parse_args()))
