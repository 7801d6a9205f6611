"""The `curl` line that `omni up` prints is pasted into a shell, and this pipeline answers it."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_up import PATIENCE_S, up

PIPELINE = """\
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: kinds}
spec:
  modelPath: "org/the model's name"
  serves: [SERVES]
  env: [{name: GREETING, value: hi}]
  coordinator: {http: {apiKeySecretRef: {name: door, key: key}}}
  code:
    inline:
      kinds.py: |
        import os
        import numpy
        import stage_runtime as omni
        def create():
            def run(payload):
                match payload.request.kind:
                    case "speech":
                        return omni.Audio(numpy.zeros(2400, numpy.float32), 24000)
                    case "pipeline":
                        return {"said": payload.request.inputs}
                    case _:
                        return omni.Text(os.environ["GREETING"])
            return run
  stages: [{name: only, process: only, factory: "kinds:create", terminal: true}]
"""
SECRET = """\
---
apiVersion: v1
kind: Secret
metadata: {name: door}
stringData: {key: "s3same$(x)"}
"""


curl = pytest.mark.debian("curl")


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for the run that no other test looks into. pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def pasted(base: Path, serves: str, *more: str, beside: str = "") -> tuple[str, subprocess.CompletedProcess[str], str]:
    """The line, what came of it in a shell, and all that `omni up` printed."""
    file = base / "kinds.yaml"
    file.write_text(PIPELINE.replace("SERVES", serves) + beside)
    with up(base, *more, file=file) as run:
        run.wait_for(r"\^C stops it")
        (line,) = re.findall(r"^curl .*$", run.text, re.MULTILINE)
        shell = ["sh", "-c", line]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=base)
        return line, done, run.text


@curl
def test_of_chat_with_the_key_of_the_file_s_secret(base: Path) -> None:
    _, done, printed = pasted(base, "chat", beside=SECRET)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"] == "hi"  # `env` has reached the stage
    assert "s3same" not in printed
    assert "note:" not in printed


@curl
def test_of_speech_at_an_ipv6_address_with_a_key_s_file(base: Path) -> None:
    key = base / "it's a key"
    key.write_text("sesame\n")
    line, done, _ = pasted(base, "speech", "--host", "::1", "--api-key-file", str(key))
    assert done.returncode == 0, done.stderr
    assert "http://[::1]:" in line
    with wave.open(str(base / "answer.wav")) as sound:
        assert sound.getframerate() == 24000


@curl
def test_of_transcription_with_a_sound_that_is_there(base: Path) -> None:
    _, done, printed = pasted(base, "transcription", "--host", "0.0.0.0", "--no-auth")
    assert json.loads(done.stdout)["text"] == "hi"
    assert "note: coordinator.http.apiKeySecretRef: no key is required, --no-auth\n" in printed


@curl
def test_of_a_pipeline_without_openai_routes(base: Path) -> None:
    _, done, printed = pasted(base, "")
    assert "hello there" in done.stdout
    assert '"error"' not in done.stdout
    assert "note: coordinator.http.apiKeySecretRef: no key is required, Secret 'door' is missing here" in printed


@curl
def test_a_key_is_asked_for_by_every_route_that_is_not_a_probe(base: Path) -> None:
    file = base / "kinds.yaml"
    file.write_text(PIPELINE.replace("SERVES", "chat") + SECRET)
    with up(base, file=file) as run:
        url = run.wait_for(r"answers at (http://\S+)")[1]
        for path, code in (("v1/models", "401"), ("status", "401"), ("readyz", "200")):
            finished = subprocess.run(
                ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{url}/{path}"],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=True,
            )
            assert finished.stdout == code, path


def test_omni_up_refuses_to_listen_for_everybody_without_a_key(base: Path) -> None:
    file = base / "kinds.yaml"
    file.write_text(PIPELINE.replace("SERVES", "chat"))
    with up(base, "--host", "0.0.0.0", file=file) as run:
        assert run.program.wait(PATIENCE_S) == 1
        assert run.text.startswith("error: --host 0.0.0.0 is reached from other machines, and no API key is set")
        assert len(run.text.splitlines()) == 1
    with up(base, "--no-auth", "--api-key-file", "x", file=file) as run:
        assert run.program.wait(PATIENCE_S) == 2
