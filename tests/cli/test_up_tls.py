"""``omni up --tls-cert --tls-key``: HTTPS of real processes, whose certificate is replaced in mid-stream."""

from __future__ import annotations

import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.test_up import OMNI, PATIENCE_S, eventually, up
from tests.web.certificate_authority import Authority, write

SLOW = """\
serves: [chat]
stages: [{name: say, process: say, factory: "slowly:create", terminal: true}]
code:
  inline:
    slowly.py: |
      import asyncio
      import os
      import stage_runtime as omni
      def create():
          async def run(payload):
              yield omni.Chunk(omni.Text("begun "))
              while payload.request.last_text() == "wait" and not os.path.exists(os.environ["GATE"]):
                  await asyncio.sleep(0.01)
              yield omni.Chunk(omni.Text("ended"))
          return run
"""
CA = Authority()


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for the run that no other test looks into. pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def asked(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "stream": True}


@pytest.mark.proves("certificate-replaced")
def test_a_certificate_is_replaced_under_a_stream_and_commands_find_the_run(base: Path) -> None:
    file, gate = base / "slow.yaml", base / "gate"
    file.write_text(SLOW)
    chain, key = write(CA.issue("old"), base / "tls")
    environ = {"GATE": str(gate), "PATH": "/usr/bin:/bin"}
    with up(base, "--tls-cert", str(chain), "--tls-key", str(key), file=file, environ=environ) as run:
        url = run.wait_for(r"answers at (https://\S+)")[1]
        with httpx.Client(base_url=url, verify=CA.trusted(), timeout=PATIENCE_S) as http:
            with http.stream("POST", "/v1/chat/completions", json=asked("wait")) as answer:
                pieces = answer.iter_text()
                begun = next(pieces)
                assert shown(url) == "old"
                write(CA.issue("new", kind="rsa"), base / "tls")
                eventually(lambda: shown(url) == "new")
                gate.touch()
                text = begun + "".join(pieces)
        assert "begun" in text and "ended" in text and text.endswith("data: [DONE]\n\n")
        top = [*OMNI, "top", "--once", "--base-path", str(base)]
        listed = subprocess.run(top, capture_output=True, text=True, timeout=PATIENCE_S)
        assert listed.returncode == 0 and "say" in listed.stdout, listed
        write(CA.issue("hidden", password=b"secret"), base / "tls")
        run.wait_for("protected by a password.*; the certificate that was read before stays")
        assert shown(url) == "new"


@pytest.mark.parametrize("wrong", ["no file", "another key", "a key alone"])
def test_a_certificate_that_cannot_be_used_ends_the_start_at_once(base: Path, wrong: str) -> None:
    chain, key = write(CA.issue("one"), base / "tls")
    given = {
        "no file": (str(base / "none.pem"), str(key)),
        "another key": (str(chain), str(write(CA.issue("other"), base / "other")[1])),
        "a key alone": ("", str(key)),
    }[wrong]
    said = {"no file": "none.pem: No such file", "another key": "key values mismatch", "a key alone": "give both"}[
        wrong
    ]
    arguments = ["--tls-cert", given[0], "--tls-key", given[1]] if given[0] else ["--tls-key", given[1]]
    with up(base, *arguments) as run:
        run.wait_for(said)
        assert run.program.wait(PATIENCE_S) in (1, 2)


def shown(url: str) -> str:
    """The subject of the certificate that the server shows."""
    import socket

    at = httpx.URL(url)
    with socket.create_connection((at.host, at.port), timeout=PATIENCE_S) as plain:
        with CA.trusted().wrap_socket(plain, server_hostname="localhost") as secured:
            facts = secured.getpeercert()
    assert facts is not None
    subject: ssl._PeerCertRetDictType = facts
    return str(dict(one for part in subject["subject"] for one in part)["commonName"])  # type: ignore[misc]
