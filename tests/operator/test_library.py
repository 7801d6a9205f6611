"""The operator imports one half of the kubernetes package, and the other half is found when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORTED = "import omnipipeline_operator.cluster.client, sys; "


def output(code: str) -> str:
    """The output of a new process."""
    done = subprocess.run([sys.executable, "-c", IMPORTED + code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def test_the_half_that_blocks_is_not_imported() -> None:
    unused = ("requests", "oauthlib", "websocket", "kubernetes.client", "kubernetes.aio.dynamic")
    assert output(f"print([each for each in {unused!r} if each in sys.modules])") == "[]"


@pytest.mark.parametrize(
    "code, expected",
    [
        ("from kubernetes import client; print(client.V1Pod.__name__)", "V1Pod"),
        ("import kubernetes; print(kubernetes.config.load_kube_config.__name__)", "load_kube_config"),
        ("from kubernetes.aio import dynamic; print(dynamic.DynamicClient.__name__)", "DynamicClient"),
        ("import kubernetes; print(kubernetes.__version__ == kubernetes.aio.__version__)", "True"),
        ("import kubernetes; print(hasattr(kubernetes, 'absent'))", "False"),
    ],
)
def test_everything_else_is_found_when_it_is_asked_for(code: str, expected: str) -> None:
    assert output(code) == expected
