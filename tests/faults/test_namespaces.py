"""Networks that a killed run of the fault benchmark leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faultlab import namespaces, network

pytestmark = [
    pytest.mark.netns,
    pytest.mark.debian("iproute2"),
    pytest.mark.skipif(
        not network.possible() and not os.environ.get("CI"), reason="needs root, to make network namespaces"
    ),
]

MAKER = """
import os, signal
from benchmarks.faultlab import namespaces
name = namespaces.new_name("ot")
namespaces.ip("netns", "add", f"{name}-near")
namespaces.ip("link", "add", name, "type", "bridge")
print(name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def present(name: str) -> list[bool]:
    return [(folder / one).exists() for folder, one in ((namespaces.SPACES, f"{name}-near"), (namespaces.LINKS, name))]


def test_what_a_killed_run_left_is_deleted_by_the_next_one_and_what_a_living_one_has_is_not() -> None:
    maker = subprocess.run([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    left, own = maker.stdout.decode().strip(), namespaces.new_name("ot")
    namespaces.ip("netns", "add", f"{own}-near")
    namespaces.ip("link", "add", own, "type", "bridge")
    try:
        assert (present(left), present(own)) == ([True, True], [True, True])
        namespaces.delete_left("ot")
        assert (present(left), present(own)) == ([False, False], [True, True])
    finally:
        namespaces.ip("netns", "del", f"{own}-near")
        namespaces.ip("link", "del", own)
