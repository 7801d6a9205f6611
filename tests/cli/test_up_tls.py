"""``omni up --tls-cert --tls-key``: HTTPS of real processes, whose certificate is replaced in mid-stream."""

from __future__ import annotations

import re
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from stage_runtime.web.listening.certificates import CertificatePair
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
        # The log has the cause of each wrong one, and the certificate stays until the next good one.
        good = CA.issue("good")
        for number, (wrong, cause) in enumerate(
            [
                (CA.issue("hidden", password=b"secret"), "protected by a password"),
                (CertificatePair(good.chain, CA.issue("other").key), "key values mismatch"),
                (CertificatePair(b"garbage", good.key), "the certificate is not PEM"),
                (CertificatePair(good.chain, b""), "the private key is empty"),
            ]
        ):
            before = shown(url)
            write(wrong, base / "tls")
            run.wait_for(f"cannot replace the certificate: .*{cause}.*; the one that was read before stays")
            assert shown(url) == before
            assert counted(url)["refused"] == 1
            if not number:
                for command in (top, [*OMNI, "restart", "say", "--base-path", str(base)]):
                    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
                    assert found.returncode == 0, found
            write(CA.issue(f"repaired-{number}"), base / "tls")
            eventually(partial(is_shown, url, f"repaired-{number}"))
        # The key is not there.
        eventually(lambda: counted(url)["refused"] == 0)
        key.unlink()
        run.wait_for("cannot replace the certificate: .*tls.key: No such file or directory; the one that was")
        assert shown(url) == "repaired-3"
        assert counted(url)["refused"] == 1
        key.symlink_to(Path("..data") / "tls.key")
        eventually(lambda: counted(url)["refused"] == 0)
        write(CA.issue("whole"), base / "tls")
        eventually(lambda: shown(url) == "whole")
        two_days_s = 2 * 24 * 3600
        life = counted(url)
        assert life["not_after_timestamp_seconds"] - life["not_before_timestamp_seconds"] == two_days_s


@pytest.mark.long
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(CA.issue("expired", days=(-2, -1)), id="expired"),
        pytest.param(CA.issue("to come", days=(1, 2)), id="not valid yet"),
        pytest.param(CA.issue("other use", use=ExtendedKeyUsageOID.CLIENT_AUTH), id="of clients"),
    ],
)
def test_a_run_starts_and_is_found_with_a_certificate_that_clients_may_refuse(
    base: Path, pair: CertificatePair
) -> None:
    file = base / "slow.yaml"
    file.write_text(SLOW)
    chain, key = write(pair, base / "tls")
    with up(base, "--tls-cert", str(chain), "--tls-key", str(key), file=file) as run:
        url = run.wait_for(r"answers at (https://\S+)")[1]
        with httpx.Client(verify=False, timeout=PATIENCE_S) as http:
            assert http.get(f"{url}/readyz").status_code == 200
        top = [*OMNI, "top", "--once", "--base-path", str(base)]
        found = subprocess.run(top, capture_output=True, text=True, timeout=PATIENCE_S)
        assert found.returncode == 0 and "say" in found.stdout, found
        # A server that shows another certificate is not this run's, though the same authority has signed it.
        write_shown(base, CA.issue("another"))
        found = subprocess.run(top, capture_output=True, text=True, timeout=PATIENCE_S)
        assert found.returncode == 1 and "the server's certificate is not in" in found.stderr, found


def write_shown(base: Path, pair: CertificatePair) -> None:
    """Let the commands of a run expect this certificate."""
    (file,) = base.glob("omni-*/certificate.pem")
    file.write_bytes(pair.chain)


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


def counted(url: str) -> dict[str, float]:
    """The metrics of the certificate."""
    text = httpx.get(f"{url}/metrics", verify=CA.trusted(), timeout=PATIENCE_S).text
    found = re.findall(r"^omnipipeline_http_certificate_(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def is_shown(url: str, name: str) -> bool:
    return shown(url) == name


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
