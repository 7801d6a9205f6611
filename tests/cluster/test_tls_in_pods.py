"""`choir` by HTTPS at two coordinators: its certificate is replaced, and one of them is killed, both under load."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.conftest import CHOIR
from tests.cluster.installing import Installed, wait_for, wait_ready
from tests.cluster.load import Load
from tests.web.certificate_authority import Authority

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900, func_only=True),
    # A kubelet writes a changed Secret within two minutes. Each run has tests/web/test_http_tls.py.
    pytest.mark.nightly,
]

SECRET = "choir-certificate"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def trusted(authority: Authority) -> ssl.SSLContext:
    """The authority's certificates, whatever the address: tests ask the Service by the one that it has."""
    context = authority.trusted()
    context.check_hostname = False
    return context


@pytest.fixture
def secured(installed: Installed, choir: str, authority: Authority) -> Iterator[str]:
    """Its URL; afterwards it is as its file says."""
    write(installed, authority, "old")
    made: dict[str, Any] = yaml.safe_load(CHOIR.read_text())
    made["spec"]["coordinator"] |= {"replicas": 2, "http": {"tls": {"secretName": SECRET}}}
    installed.kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(made))
    wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)
    wait_for("both coordinators are ready", lambda: ready(installed) == 2 or None, timeout_s=120)
    yield choir.replace("http://", "https://")
    installed.kubectl("apply", "-f", str(CHOIR))
    wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)
    installed.kubectl("delete", "secret", SECRET)


def write(installed: Installed, authority: Authority, name: str) -> None:
    pair = authority.issue(name)
    data = {"tls.crt": pair.chain, "tls.key": pair.key}
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "type": "kubernetes.io/tls"}
    installed.kubectl("apply", "-f", "-", stdin=json.dumps({**secret, "data": encoded}))


def coordinators(installed: Installed) -> list[dict[str, Any]]:
    found = installed.pods("choir", "coordinator")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def ready(installed: Installed) -> int:
    conditions = [each for pod in coordinators(installed) for each in pod["status"].get("conditions", ())]
    return sum((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def shown(installed: Installed, trusted: ssl.SSLContext) -> set[str]:
    """The subjects of the certificates that the coordinators show."""
    found = set()
    for pod in coordinators(installed):
        with socket.create_connection((pod["status"]["podIP"], 8000), timeout=10) as plain:
            with trusted.wrap_socket(plain, server_hostname="localhost") as one:
                facts: Any = one.getpeercert()
        found.add(str(dict(each for part in facts["subject"] for each in part)["commonName"]))
    return found


@pytest.mark.proves("certificate-replaced")
async def test_a_certificate_of_a_secret_is_replaced_and_no_request_fails(
    installed: Installed, secured: str, trusted: ssl.SSLContext, authority: Authority
) -> None:
    assert await asyncio.to_thread(shown, installed, trusted) == {"old"}
    async with Load(secured, clients=4, slow=1, tls=trusted) as load:
        await load.some(20)
        await asyncio.to_thread(write, installed, authority, "new")
        replaced = "both show the new certificate"
        await asyncio.to_thread(wait_for, replaced, lambda: shown(installed, trusted) == {"new"} or None, timeout_s=180)
        await load.some(40)
    assert load.failures() == {}, load.failures()
    print(f"{len(load.entries)} requests")


async def test_one_of_two_coordinators_is_killed_and_the_other_answers(
    installed: Installed, secured: str, trusted: ssl.SSLContext
) -> None:
    async with Load(secured, clients=6, slow=3, tls=trusted) as load:
        await load.some(30)
        [killed, _] = await asyncio.to_thread(coordinators, installed)
        began, before = time.monotonic(), len(load.entries)
        force = ("--grace-period=0", "--force", "--wait=false")
        await asyncio.to_thread(installed.kubectl, "delete", "pod", killed["metadata"]["name"], *force)
        await asyncio.to_thread(wait_for, "two again", lambda: ready(installed) == 2 or None, timeout_s=120)
        took_s = time.monotonic() - began
        await load.some(30)
    broken = {outcome: count for outcome, count in load.failures().items() if hasattr(httpx, outcome)}
    print(f"of {len(load.entries) - before} requests failed: {Counter(broken)}; two again after {took_s:.1f} s")
    # A stream that has begun is cut, and a connection that is made before the endpoint is gone is refused.
    assert load.failures() == broken, "the other one answers all that it is asked"
