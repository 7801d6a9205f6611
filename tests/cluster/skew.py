"""Versions N and N-1 of operator and stage image together, in both directions, with real images of both.

Not collected by itself, since an older image has to be built first from its own sources:

    git archive COMMIT | tar -x -C OLD
    cluster build -t localhost/omnipipeline-stage:old -f OLD/Dockerfile --target stage OLD
    (and --target operator); pytest tests/cluster/skew.py

A mixture serves while both speak one PROTOCOL (docs/contracts.md, Versions). In CI the rule stands alone: a process of
another protocol, and a plan of a later version, are refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from conftest import CHOIR
from installing import CHART, RELEASE, SYSTEM, Installed, helm, url, wait_ready
from ledger import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900, func_only=True)]

OLD_OPERATOR = "localhost/omnipipeline-operator:old"
OLD_STAGE = "localhost/omnipipeline-stage:old"


def _with_image(container: str, image: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": container, "image": image}]}}}


VOICES = {"name": "voices", "replicas": 2, **_with_image("stage", OLD_STAGE)}
ENDS = [{"name": name, **_with_image("stage", OLD_STAGE)} for name in ("front", "back")]
MIXTURES: dict[str, dict[str, Any]] = {
    "one group is older": {"processGroups": [VOICES]},
    "one group is newer": {"processGroups": ENDS, "coordinator": _with_image("coordinator", OLD_STAGE)},
    "the coordinator is older": {"coordinator": _with_image("coordinator", OLD_STAGE)},
    "all of it is older": {"image": OLD_STAGE},
}


@pytest.mark.parametrize("mixture", MIXTURES)
async def test_a_mixture_serves_every_request(installed: Installed, mixture: str) -> None:
    await _serves(installed, "mixed", MIXTURES[mixture])
    installed.kubectl("delete", "omnipipeline", "mixed", "--cascade=foreground", "--timeout=170s")


async def test_the_older_operator_runs_the_newer_image_and_its_upgrade_restarts_nothing(installed: Installed) -> None:
    repository, tag = OLD_OPERATOR.rsplit(":", 1)
    chosen = ["--set-string", f"image.repository={repository}", "--set-string", f"image.tag={tag}"]
    where = ["--namespace", SYSTEM, "--wait", "--timeout", "240s"]
    helm(installed.cluster, "upgrade", RELEASE, str(CHART), "--reuse-values", *chosen, *where)
    await _serves(installed, "under-old", {})
    before = installed.uids("under-old")
    helm(installed.cluster, "rollback", RELEASE, "1", *where)
    installed.patch("under-old", {"disruption": {"podDisruptionBudget": {"enabled": True}}})  # it looks again
    wait_ready(installed.cluster, installed.namespace, "under-old")
    assert installed.uids("under-old") == before
    await _serves(installed, "under-old", {"disruption": {"podDisruptionBudget": {"enabled": True}}})
    assert installed.uids("under-old") == before


async def _serves(installed: Installed, name: str, more: dict[str, Any]) -> None:
    wanted = yaml.safe_load(CHOIR.read_text())
    wanted["metadata"]["name"] = name
    wanted["spec"] |= {key: value for key, value in more.items() if key != "coordinator"}
    wanted["spec"]["coordinator"] |= more.get("coordinator", {})
    installed.apply(wanted)
    wait_ready(installed.cluster, installed.namespace, name)
    async with Load(url(installed.cluster, installed.namespace, name)) as load:
        await load.some(300)
    assert load.failures() == {}, load.failures()
