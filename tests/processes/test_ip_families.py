"""Pods that have addresses of one IP family alone: the operator's own environment, real programs, a network namespace
for each pod.

A pod's loopback has 127.0.0.1, as a kubelet makes it; pods with IPv6 have no IPv4 between them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.faultlab import namespaces, network
from omnipipeline_operator.cluster.status_client import CoordinatorStatus
from omnipipeline_operator.desired import children
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig
from stage_runtime.processes.starting import codefiles
from stage_runtime.sockets.endpoints import hosts
from tests.patience import patience

PATIENCE_S = patience(120.0)
pytestmark = [
    pytest.mark.netns,
    pytest.mark.debian("iproute2"),
    pytest.mark.timeout(3 * PATIENCE_S),
    pytest.mark.skipif(
        not network.possible() and not os.environ.get("CI"), reason="needs root, to make network namespaces"
    ),
]

PREFIX: Final = "o6"
NETWORKS: Final = {6: ("fd00:c1a5:7e57::", "/64"), 4: (f"10.214.{80 + os.getpid() % 160}.", "/24")}
ISOLATED: Final = ("unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")  # as pods are
ETC: Final = "/etc/omnipipeline"
CODE = """
import numpy
import stage_runtime as omni
NUMBERS = 1 << 20  # 8 MiB: more than a message takes, so it goes by a relay

def fill():
    return lambda payload: {"numbers": numpy.full(NUMBERS, payload.request.inputs["number"])}
def double():
    return lambda payload: {"numbers": payload.data["numbers"] * 2}
def add():
    return lambda payload: {"sum": int(payload.data["numbers"].sum())}
"""
SHARED = {"gpu": [0], "gpuMemory": {"fraction": 0.4}}  # one GPU, one pod; the plan is run without it
SPEC = {
    "name": "six",
    "code": {"inline": {"six.py": CODE}},
    "stages": [
        {"name": "fill", "process": "fill", "factory": "six:fill", "next": ["double"], **SHARED},
        {"name": "double", "process": "double", "factory": "six:double", "next": ["add"], **SHARED},
        {"name": "add", "process": "add", "factory": "six:add", "terminal": True},
    ],
}


class Pods:
    """Network namespaces on one bridge, with an address each, and the processes in them."""

    def __init__(self, folder: Path, family: int) -> None:
        self.folder, self._family = folder, family
        namespaces.delete_left(PREFIX)
        self._name = namespaces.new_name(PREFIX)
        self._spaces: list[str] = []
        self._running: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "log").open("wb")
        namespaces.ip("link", "add", self._name, "type", "bridge")
        self._address(self._name, 1)
        namespaces.ip("link", "set", self._name, "up")

    def add(self) -> tuple[str, str]:
        """A pod's namespace and its address."""
        number = len(self._spaces) + 2
        space, outer = f"{self._name}-{number}", f"{self._name}v{number}"
        namespaces.ip("netns", "add", space)
        self._spaces.append(space)
        namespaces.ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        namespaces.ip("link", "set", outer, "master", self._name, "up")
        if self._family == 4:  # as on a node whose sysctls switch IPv6 off
            namespaces.ip("netns", "exec", space, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        address = self._address("eth0", number, "-n", space)
        for link in ("lo", "eth0"):
            namespaces.ip("-n", space, "link", "set", link, "up")
        return space, address

    def _address(self, link: str, number: int, *where: str) -> str:
        network, width = NETWORKS[self._family]
        once = ("nodad",) if self._family == 6 else ()
        namespaces.ip(*where, "addr", "add", f"{network}{number}{width}", "dev", link, *once)
        return f"{network}{number}"

    def run(self, space: str, role: str, environment: Mapping[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_")}
        program = f"mount -t tmpfs tmpfs /dev/shm && exec {sys.executable} -P -m stage_runtime {role}"
        argv = ["nsenter", f"--net=/run/netns/{space}", *ISOLATED, "sh", "-c", program]
        env = {**clean, **environment}
        self._running.append(subprocess.Popen(argv, env=env, stdout=self._log, stderr=subprocess.STDOUT))

    def check(self) -> None:
        """Raises: AssertionError: a process has ended."""
        ended = [one.args for one in self._running if one.poll() is not None]
        assert not ended, f"{ended}\n{(self.folder / 'log').read_text()[-6000:]}"

    def close(self) -> None:
        for one in self._running:
            one.kill()
        for one in self._running:
            one.wait(PATIENCE_S)
        self._log.close()
        for space in self._spaces:
            namespaces.ip("netns", "del", space)
        namespaces.ip("link", "del", self._name)


@pytest.fixture(params=[6, 4], ids=["IPv6", "IPv4"])
def pods(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pods]:
    with contextlib.closing(Pods(tmp_path, request.param)) as made:
        yield made


def environment(template: Mapping[str, Any], address: str, folder: Path) -> dict[str, str]:
    """The operator's variables for a container, as a kubelet passes them on; its volumes are folders of the test."""
    given: dict[str, str] = {}
    for variable in template["spec"]["containers"][0]["env"]:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        value = {"status.podIP": address, "metadata.uid": address}[field] if field else variable["value"]
        given[variable["name"]] = value.replace("$(OMNI_POD_IP)", address).replace(ETC, str(folder))
    return given


@pytest.mark.proves("one-ip-family")
def test_pods_with_one_ip_family_serve_by_shared_memory_and_by_tcp(pods: Pods, tmp_path: Path) -> None:
    spec = msgspec.convert(SPEC, PipelineConfig)
    plan = planning.without_gpus(planning.plan(spec))
    facts = PodFacts(owner=Owner(namespace="space", name="six", uid="u"), image="stage:1", control_secret="s")
    made = children.children(spec, planning.plan(spec), facts)
    templates = {one.unit: one.deployment["spec"]["template"] for one in made.workloads}
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "key").write_bytes(os.urandom(32))
    (tmp_path / "revisions").mkdir()
    (tmp_path / "revisions" / "revisions.json").write_bytes(msgspec.json.encode([plan.current]))
    codefiles.write({"six.py": CODE}, tmp_path / "code")
    profiles = {"OMNI_PROFILE_ROOT": str(tmp_path / "profiles"), "PYTHONPATH": str(tmp_path / "code")}

    space, coordinator = pods.add()
    addresses: list[str] = []
    for unit, content in [("coordinator", plan.coordinator), *((unit.name, unit) for unit in plan.units)]:
        where, address = (space, coordinator) if unit == "coordinator" else pods.add()
        folder = tmp_path / unit
        folder.mkdir()
        for shared in ("control", "revisions"):
            (folder / shared).symlink_to(tmp_path / shared)
        (folder / "plan").mkdir()
        (folder / "plan" / "plan.json").write_bytes(msgspec.json.encode(content))
        variables = environment(templates[unit], address, folder) | profiles
        if unit != "coordinator":
            assert variables["OMNI_COORDINATOR"] == "tcp://six-peers.space.svc:5550"
            addresses.append(address)
            variables["OMNI_COORDINATOR"] = f"tcp://{hosts.bracketed(coordinator)}:5550"  # no DNS answers here
        pods.run(where, "coordinator" if unit == "coordinator" else "supervisor", variables)

    at = f"http://{hosts.bracketed(coordinator)}"
    eventually(lambda: httpx.get(f"{at}:8081/readyz", timeout=5).status_code == 200, pods.check)
    for number in (3, 4):  # the relays connect with the first payload
        answer = httpx.post(f"{at}:8000/v1/pipeline", json={"inputs": {"number": number}}, timeout=PATIENCE_S)
        assert answer.json()["results"]["add"]["sum"] == number * 2 * (1 << 20), answer.text
    status = httpx.get(f"{at}:8081/status", timeout=PATIENCE_S).content
    instances = msgspec.json.decode(status, type=CoordinatorStatus).instances
    assert {one.host for one in instances} == set(addresses), "the operator knows them as pods' addresses are written"
    [both] = {one.host for one in instances if sum(other.host == one.host for other in instances) == 2}
    expected = {("fill", "double"): {"shm"}, ("double", "add"): {"tcp"}}
    eventually(lambda: relays(both).items() >= expected.items(), pods.check)  # a pod's metrics come with beats


def relays(address: str) -> dict[tuple[str, str], set[str]]:
    """Edge -> the relays by which payloads left a pod."""
    text = httpx.get(f"http://{hosts.bracketed(address)}:8081/metrics", timeout=PATIENCE_S).text
    found: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "omnipipeline_edge_transfer_bytes_total" and sample.value:
                labels = sample.labels
                found.setdefault((labels["source"], labels["target"]), set()).add(labels["relay"])
    return found


def eventually(holds: Callable[[], bool], check: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        check()
        with contextlib.suppress(httpx.HTTPError):
            if holds():
                return
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tcp://10.0.0.7:5550", "tcp://10.0.0.7:5550"),
        ("tcp://fd00::7:5550", "tcp://[fd00::7]:5550"),
        ("tcp://[fd00::7]:5550", "tcp://[fd00::7]:5550"),
        ("tcp://name.space.svc:5550", "tcp://name.space.svc:5550"),
        ("ipc:///run/x.sock", "ipc:///run/x.sock"),
    ],
)
def test_an_endpoint_with_an_address_as_kubernetes_writes_it_gets_its_brackets(written: str, meant: str) -> None:
    assert hosts.written_out(written) == meant


def test_a_listener_anywhere_is_reached_by_both_families() -> None:
    assert hosts.everywhere() in ("::", "0.0.0.0")
    assert hosts.written_out("tcp://*:5550") == f"tcp://{hosts.bracketed(hosts.everywhere())}:5550"
    assert hosts.host("127.0.0.1") == "127.0.0.1"
