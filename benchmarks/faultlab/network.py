"""A pipeline as on several machines: every process in a network namespace of its own, TCP and CURVE between them.

Needs root. One bridge, one veth pair per process; a cut takes the process's link down, without notice.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import httpx
import msgspec

from benchmarks.faultlab import looking, namespaces
from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig
from stage_runtime.processes.starting import codefiles, launching
from stage_runtime.processes.starting.launching import Addresses, StageLaunch
from stage_runtime.processes.supervision.children import Command
from stage_runtime.processes.supervision.instances import InstanceSpec, RestartPolicy
from stage_runtime.processes.supervision.supervisor import Supervisor

SUBNET = f"10.213.{80 + os.getpid() % 160}"  # runs side by side on one machine need networks of their own
PORT = 5550
LIMIT_S = 120.0  # until a pipeline runs, or has ended: a loaded machine takes 20
PREFIX = "om"


class Network:
    """Namespaces on one bridge. Close it, or they stay."""

    def __init__(self) -> None:
        namespaces.delete_left(PREFIX)
        self.name = namespaces.new_name(PREFIX)
        self._numbers = itertools.count(2)
        self._hosts: dict[str, int] = {}
        namespaces.ip("link", "add", self.name, "type", "bridge")
        namespaces.ip("addr", "add", f"{SUBNET}.1/24", "dev", self.name)
        namespaces.ip("link", "set", self.name, "up")

    def add(self, host: str) -> str:
        """A machine of that name; its address."""
        number = self._hosts[host] = next(self._numbers)
        space, outer = self.space(host), self._outer(host)
        namespaces.ip("netns", "add", space)
        namespaces.ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        namespaces.ip("link", "set", outer, "master", self.name, "up")
        for words in (("addr", "add", f"{SUBNET}.{number}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            namespaces.ip("-n", space, *words)
        namespaces.ip("-n", space, "link", "set", "lo", "up")
        return self.address(host)

    def inside(self, host: str, command: Command) -> Command:
        """The command, run on that machine."""
        return msgspec.structs.replace(command, argv=("nsenter", f"--net=/run/netns/{self.space(host)}", *command.argv))

    def limit(self, host: str, nbytes_per_s: int) -> None:
        """That machine sends no more bytes a second. Packets of 64 KiB, as the kernel makes them, are not divided."""
        namespaces.limit(self.space(host), "eth0", nbytes_per_s, burst_nbytes=1 << 20)

    def cut(self, host: str) -> None:
        namespaces.ip("link", "set", self._outer(host), "down")

    def mend(self, host: str) -> None:
        namespaces.ip("link", "set", self._outer(host), "up")

    def part(self, one: str, other: str) -> None:
        """These two lose each other; everybody else still reaches both."""
        for here, there in ((one, other), (other, one)):
            nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
            namespaces.ip("-n", self.space(here), "neigh", "replace", self.address(there), *nobody)

    def unite(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            namespaces.ip("-n", self.space(here), "neigh", "del", self.address(there), "dev", "eth0")

    def close(self) -> None:
        for host in self._hosts:
            namespaces.ip("netns", "del", self.space(host))
        namespaces.ip("link", "del", self.name)

    def space(self, host: str) -> str:
        return f"{self.name}-{self._hosts[host]}"

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._hosts[host]}"

    def _outer(self, host: str) -> str:
        return f"{self.name}v{self._hosts[host]}"


def possible() -> bool:
    """Whether this user may make network namespaces, and has the tools."""
    if os.geteuid() != 0:
        return False
    try:
        probe = f"om-probe-{os.getpid()}"
        namespaces.ip("netns", "add", probe)
        namespaces.ip("netns", "del", probe)
        subprocess.run(["nsenter", "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class NetPipeline:
    """A pipeline on a `Network`, as pods would run it."""

    def __init__(self, spec: PipelineConfig, *, log: Path | None = None, keyed: bool = True) -> None:
        """keyed: what goes over TCP is encrypted by CURVE."""
        self._plan = planning.plan(spec)
        self._keyed = keyed
        self._log = log
        self._supervisor = Supervisor(on_change=lambda _: None, on_line=self._line)

    async def __aenter__(self) -> NetPipeline:
        self._folder = tempfile.TemporaryDirectory(prefix="n-")
        self.network = Network()
        try:
            self._launch(Path(self._folder.name))
            await self.ready()
            self._supervisor.settle()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self._supervisor.ask_all_to_stop()
            await asyncio.wait_for(self._supervisor.gone(), LIMIT_S)
        except TimeoutError:
            raise TimeoutError(f"not ended within {LIMIT_S:g} s: {sorted(self.pids())}") from None
        finally:
            await self._supervisor.close()
            self.network.close()
            self._folder.cleanup()

    def pids(self) -> dict[str, int]:
        return {view.process: view.pid for view in self._supervisor.views() if view.pid is not None}

    async def ready(self) -> None:
        """Everything runs, and the coordinator knows it. Raises: TimeoutError: something does not."""
        await self._supervisor.started()
        wanted = Counter(one.spec.group for one in self._supervisor.instances() if one.spec.name != "coordinator")
        ready: Counter[str] = Counter()
        try:
            async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(base_url=self.url) as http:
                while not ready >= wanted:
                    instances = (await looking.status(http))["instances"]
                    ready = Counter(one["group"] for one in instances if one["ready"] and not one["draining"])
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"not ready within {LIMIT_S:g} s: {wanted - ready}") from None

    def _launch(self, folder: Path) -> None:
        for code in (*(unit.code for unit in self._plan.units), self._plan.coordinator.code):
            codefiles.write(code, folder / "code")
        common = launching.environment(os.environ, path=(folder / "code",), code_dir=folder / "code")
        if self._keyed:
            key = folder / "key"
            key.write_bytes(secrets.token_bytes(32))
            common["OMNI_CONTROL_KEY_FILE"] = str(key)
        coordinator = self.network.add("coordinator")
        self.url = f"http://{coordinator}:8000"
        environment = {
            **common,
            "OMNI_PLAN": _written(folder / "coordinator.json", self._plan.coordinator),
            "OMNI_REVISIONS": _written(folder / "revisions.json", [self._plan.current]),
            "OMNI_LISTEN": f"tcp://{coordinator}:{PORT}",
            "OMNI_PUBLISH": f"tcp://{coordinator}:{PORT - 1}",
            "OMNI_HTTP_HOST": coordinator,
            "OMNI_HTTP_PORT": "8000",
        }
        self._add("coordinator", launching.coordinator_instance(environment, dict))
        for unit in self._plan.units:
            plan_file = _written(folder / f"{unit.name}.json", unit)
            for group in unit.groups:
                for replica in range(self._plan.replicas[unit.name]):
                    name = launching.instance_name(group.name, replica)
                    endpoint = f"tcp://{self.network.add(name)}:{PORT}"
                    launch = StageLaunch(
                        unit=unit,
                        group=group,
                        plan_file=Path(plan_file),
                        replica=replica,
                        coordinators=f"tcp://{coordinator}:{PORT}",
                        environment=common,
                        addresses=functools.partial(Addresses, listen=endpoint, advertise=endpoint),
                    )
                    self._add(name, launching.stage_instance(launch))

    def _add(self, host: str, spec: InstanceSpec) -> None:
        commands = spec.commands
        inside = msgspec.structs.replace(
            spec, commands=lambda: [self.network.inside(host, command) for command in commands()]
        )
        self._supervisor.add(inside, RestartPolicy(startup_s=60, grace_s=10))

    def _line(self, process: str, line: str) -> None:
        if self._log is not None:
            with self._log.open("a") as log:
                print(f"{process}: {line}", file=log)


def _written(path: Path, value: object) -> str:
    path.write_bytes(msgspec.json.encode(value))
    return str(path)
