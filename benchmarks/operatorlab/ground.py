"""A cluster that is full: the kit's API server, simulated nodes, the CRD, the chart's RBAC, pipelines, foreign pods.

Here: making all that, and an administrator's requests. Not here: the operator (`operated`), judging (`figures`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import os
import random
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE, POD, Kind, Manifest

REPOSITORY: Final = Path(__file__).resolve().parents[2]
SYSTEM: Final = "omni-system"
FOREIGN: Final = "size-foreign"
SPACES: Final = 10  # namespaces over which the pipelines are spread
NODES: Final = "size"
PODS_PER_NODE: Final = 400  # a simulated node takes 500
AT_ONCE: Final = 16  # requests of ours under way
EDITED: Final = "example.org/edit"  # an annotation of Services
LOOK_S: Final = 3.0
BUSY_S: Final = 0.6  # of LOOK_S; an idle one with 500 pipelines uses 0.2
NAMESPACE: Final = Kind(name="Namespace", group="", version="v1", plural="namespaces")


class Unbounded:
    """The administrator's writes wait for nothing."""

    async def take(self) -> None:
        return


class Ground(msgspec.Struct, frozen=True):
    """The address of the cluster, and who administers it."""

    kubeconfig: Path
    environment: dict[str, str]
    admin: Client

    @property
    def audit(self) -> Path:
        """One JSON line for every write: the kit's API server keeps it."""
        return self.kubeconfig.parent / "logs" / "audit.log"

    def apiserver_s(self) -> float:
        """Processor time of the API server so far."""
        process = int((self.kubeconfig.parent / "run" / "apiserver.pid").read_text())
        return processor_s(process)

    async def calm(self, *, limit_s: float) -> None:
        """Return when the API server is hardly used: the controllers have finished. Raises: TimeoutError."""
        async with asyncio.timeout(limit_s):
            used = math.inf
            while used > BUSY_S:
                before = self.apiserver_s()
                await asyncio.sleep(LOOK_S)
                used = self.apiserver_s() - before

    def run(self, *command: str | Path, stdin: str | None = None) -> str:
        """Raises: subprocess.CalledProcessError."""
        done = subprocess.run(
            command, input=stdin, env=self.environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True
        )
        return done.stdout


def processor_s(process: int) -> float:
    """Processor time of a process so far, user and system, seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def ready() -> AsyncIterator[Ground]:
    """The kit's cluster, its control plane only; one that was up is left up. It has the CRD and the operator's
    rights.
    """
    kit = Path(os.environ.get("OMNI_CLUSTER_KIT", REPOSITORY.parent / "shared" / "cluster" / "cluster"))
    state = Path(os.environ.get("CLUSTER_DIR", "/run/omni-cluster"))
    was_up = "apiserver  up" in subprocess.run([kit, "status"], stdout=subprocess.PIPE, text=True).stdout
    output = subprocess.run([kit, "up", "--no-node"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"export KUBECONFIG=(\S+) PATH=(\S+?):\$PATH", output)
    assert found is not None, output
    os.environ |= {"KUBECONFIG": found[1], "PATH": f"{found[2]}:{os.environ['PATH']}"}
    await kubernetes_config.load_kube_config(config_file=found[1])  # Client.connect: KUBECONFIG as of its import
    async with Client(kubernetes_client.ApiClient(), Unbounded(), lambda *_: None) as admin:
        ground = Ground(Path(found[1]), dict(os.environ), admin)
        try:
            _install(ground)
            yield ground
        finally:
            if not was_up:
                subprocess.run([kit, "wipe"], stdout=subprocess.DEVNULL, env=ground.environment)
            else:
                print(f"left up, with all that is in it: {state}")


def _install(ground: Ground) -> None:
    """Installs all that `helm install` does, but for the operator's pod."""
    ground.run("kubectl", "apply", "--server-side", "-f", REPOSITORY / "crds" / "omnipipelines.yaml")
    crd = "crd/omnipipelines.omnipipeline.dev"
    # A CRD that was just made has no conditions, which `kubectl wait` takes for an error.
    ground.run("kubectl", "wait", "--for=jsonpath={.status.acceptedNames.plural}=omnipipelines", crd, "--timeout=60s")
    ground.run("kubectl", "wait", "--for=condition=Established", crd, "--timeout=60s")
    parts = [flag for each in ("rbac", "serviceaccount") for flag in ("--show-only", f"templates/{each}.yaml")]
    text = ground.run("helm", "template", "omni", REPOSITORY / "charts" / "omnipipeline", "-n", SYSTEM, *parts)
    ground.run("kubectl", "apply", "-f", "-", stdin=json.dumps(_namespace(SYSTEM)))
    ground.run("kubectl", "-n", SYSTEM, "apply", "-f", "-", stdin=text)


async def furnish(ground: Ground, *, pipelines: int, foreign: int) -> None:
    """Simulated nodes for all pods, foreign pods that nobody schedules, and pipelines of `examples/hello`."""
    for space in (FOREIGN, *(f"size-{number}" for number in range(SPACES))):
        make_namespace(ground, space)
    kit = Path(os.environ.get("OMNI_CLUSTER_KIT", REPOSITORY.parent / "shared" / "cluster" / "cluster"))
    ground.run(kit, "fakenodes", NODES, str(1 + 3 * pipelines // PODS_PER_NODE), "0")
    await _make(ground, (_foreign(number) for number in range(foreign)))
    hello = yaml.safe_load((REPOSITORY / "examples" / "hello" / "pipeline.yaml").read_text())
    await _make(ground, (pipeline(hello, number) for number in range(pipelines)))


def pipeline(hello: Manifest, number: int) -> Manifest:
    """`examples/hello` under a name of its own, on the simulated nodes."""
    placement = {"tolerations": [{"key": "fake", "operator": "Exists"}], "nodeSelector": {"fake": NODES}}
    processes = dict.fromkeys(stage["process"] for stage in hello["spec"]["stages"])
    spec = {
        **hello["spec"],
        "coordinator": {"placement": placement},
        "processGroups": [{"name": each, "placement": placement} for each in processes],
    }
    space, name = address(number)
    return {**hello, "metadata": {"name": name, "namespace": space}, "spec": spec}


def address(number: int) -> tuple[str, str]:
    """Namespace and name of a pipeline."""
    return f"size-{number % SPACES}", f"p{number}"


async def edit(ground: Ground, number: int, word: str) -> None:
    """Change a pipeline's spec so that its Service must be patched, and nothing else."""
    space, name = address(number)
    await ground.admin.merge(PIPELINE, space, name, edited(word))


def edited(word: str) -> Manifest:
    """The patch of such an edit."""
    return {"spec": {"expose": {"service": {"annotations": {EDITED: word}}}}}


async def incomplete(ground: Ground, pipelines: int) -> list[str]:
    """The missing children and status of the pipelines after a first look at each."""
    missing = []
    status = {
        (each["metadata"]["namespace"], each["metadata"]["name"]): each.get("status", {}).get("observedGeneration")
        == each["metadata"]["generation"]
        async for each in ground.admin.listed(PIPELINE, None)
    }
    for number in range(pipelines):
        if not status.get(address(number)):
            missing.append(f"status of {address(number)}")
    for kind, count in ((DEPLOYMENT, 3), (CONFIG_MAP, 4)):
        found = [each async for each in ground.admin.listed(kind, None, naming.PIPELINE_LABEL)]
        if len(found) != count * pipelines:
            missing.append(f"{count * pipelines - len(found)} {kind.plural}")
    return missing


async def ready_pipelines(ground: Ground) -> int:
    """How many say that they are Ready."""
    found = 0
    async for each in ground.admin.listed(PIPELINE, None):
        conditions = {one["type"]: one["status"] for one in each.get("status", {}).get("conditions", ())}
        found += conditions.get("Ready") == "True"
    return found


@asynccontextmanager
async def storm(ground: Ground, *, foreign_per_s: float, own_per_s: float) -> AsyncIterator[None]:
    """While the block runs, foreign pods and the pipelines' own pods keep changing."""
    own = [each["metadata"] async for each in ground.admin.listed(POD, None, naming.PIPELINE_LABEL)]
    strange = [each["metadata"] async for each in ground.admin.listed(POD, FOREIGN)]
    counts = itertools.count()

    async def touch(pods: list[dict[str, Any]]) -> None:
        pod = random.choice(pods)
        patch = {"metadata": {"annotations": {"example.org/storm": str(next(counts))}}}
        try:
            await ground.admin.merge(POD, pod["namespace"], pod["name"], patch)
        except errors.NotFound:
            return

    rates = [(strange, foreign_per_s), (own, own_per_s)]
    touches = [(functools.partial(touch, pods), rate) for pods, rate in rates if pods and rate]
    tasks = [asyncio.create_task(_steadily(one, rate)) for one, rate in touches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _steadily(act: Callable[[], Awaitable[None]], per_s: float) -> None:
    """Begin so many acts a second, whether or not the earlier ones have ended."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(act())  # type: ignore[arg-type]
            await asyncio.sleep(1 / per_s)


async def _make(ground: Ground, manifests: Iterable[Manifest]) -> None:
    """Create them all; what is there already is left."""
    waiting = iter(manifests)

    async def work() -> None:
        for manifest in waiting:
            try:
                await ground.admin.create(manifest)
            except errors.Conflict:
                continue

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def make_namespace(ground: Ground, name: str) -> None:
    """Make a namespace, unless it is there."""
    ground.run("kubectl", "apply", "-f", "-", stdin=json.dumps(_namespace(name)))


def _namespace(name: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _foreign(number: int) -> Manifest:
    """A pod of somebody else's, with labels and variables as pods have them."""
    container = {
        "name": "main",
        "image": "localhost/somebody:1",
        "env": [{"name": f"VARIABLE_{each}", "value": "x" * 40} for each in range(10)],
    }
    metadata = {"name": f"foreign-{number}", "namespace": FOREIGN, "labels": {"app": "foreign", "n": str(number)}}
    spec = {"schedulerName": "nobody", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
