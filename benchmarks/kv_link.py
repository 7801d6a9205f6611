"""Bytes a second of KV blocks over a link with a bandwidth, beside raw TCP over the same link: `python -m
benchmarks.kv_link [--gbit 2.5 10] [--relays tcp nixl mooncake] [--rounds N]`. Also called by `disaggregation`.

The stages of `kv_rate` run in network namespaces of their own. All that prefill sends leaves by a link that lets
``--gbit`` through (tc's tbf). Raw TCP: a socket of prefill's namespace into decode's, as `kv_rate` has it. They take
turns. Nothing is encrypted, as raw TCP is not. Both are bound by copies in memory over loopback, which no network is.

Needs root, `ip`, `tc` and `nsenter`; without them it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import httpx

from benchmarks import kv_rate
from benchmarks.faultlab import network
from benchmarks.faultlab.network import NetPipeline
from benchmarks.kv_rate import CALL, NBYTES, Rate
from omnipipeline_spec.pipeline import Code, Disaggregation, PipelineConfig, PrefillPlacement, StageConfig
from omnipipeline_spec.types.relays import RelayBackend

RELAYS: Final[tuple[RelayBackend, ...]] = ("tcp", "nixl", "mooncake")
GBITS: Final = (2.5, 10.0)
RECEIVER: Final = """
import socket, sys, time
nbytes = int(sys.argv[2])
buffer = memoryview(bytearray(b"1") * nbytes)
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    connection.sendall(b"1")
    begun, got = time.perf_counter(), 0
    while got < nbytes:
        got += connection.recv_into(buffer[got:])
    print(time.perf_counter() - begun, flush=True)
"""


def spec(relay: RelayBackend) -> PipelineConfig:
    words = StageConfig(
        name="words",
        process="decoder",
        factory="blocks:stage",
        terminal=True,
        disaggregation=Disaggregation(prefill=PrefillPlacement(process="prefiller")),
    )
    code = Code(inline={"blocks.py": kv_rate.STAGE})
    return PipelineConfig(name="rate", stages=[words], relay_backend=relay, code=code)


def raw_tcp(net: network.Network) -> float:
    """GB/s from prefill's namespace into decode's."""

    def inside(host: str, *words: str) -> subprocess.Popen[str]:
        argv = ["nsenter", f"--net=/run/netns/{net.space(host)}", sys.executable, "-c", *words]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    address = net.address("decoder")
    with inside("decoder", RECEIVER, address, str(NBYTES)) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        with inside("prefiller", kv_rate.SENDER, port, str(CALL), str(NBYTES), address):
            taken = float(receiver.stdout.readline())
    return NBYTES / 1e9 / taken


async def of_relay(relay: RelayBackend, *, checked: bool, gbit: float, rounds: int = 5) -> list[Rate]:
    """The first round, in which connections are made, is left out."""
    found: list[Rate] = []
    async with NetPipeline(spec(relay), keyed=False) as pipeline:
        net = pipeline.network
        net.limit("prefiller", int(gbit * 1e9 / 8))
        async with httpx.AsyncClient(base_url=pipeline.url, timeout=300) as client:
            for _ in range(rounds + 1):
                inputs = {"nbytes": NBYTES, "checked": checked}
                answer = (await client.post("/v1/pipeline", json={"inputs": inputs})).json()
                rate = answer["results"]["words"]
                if rate is not None:  # None: the prefill instance is not known yet
                    found.append(Rate(rate / 1e9, await asyncio.to_thread(raw_tcp, net), kv_rate.memcpy()))
    return found[1:]


def measured(gbits: Sequence[float], relays: Sequence[RelayBackend], rounds: int = 5) -> dict[str, dict[str, float]]:
    """Print each link's rates by each relay. Returns: the medians, by what was measured."""
    if not network.possible():
        print("links with a bandwidth are not measured: this user may make no network namespaces", flush=True)
        return {}
    found = {}
    for gbit, relay, checked in itertools.product(gbits, relays, (False, True)):
        rates = asyncio.run(of_relay(relay, checked=checked, gbit=gbit, rounds=rounds))
        found[f"{relay}{' checked' if checked else ''} over {gbit:g} Gbit/s"] = kv_rate.medians(rates)
        print(f"{gbit:g} Gbit/s: {kv_rate.shown(relay, checked, rates)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", nargs="*", default=RELAYS, choices=RELAYS)
    parser.add_argument("--gbit", type=float, nargs="*", default=GBITS)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    measured(arguments.gbit, arguments.relays, arguments.rounds)


if __name__ == "__main__":
    main()
