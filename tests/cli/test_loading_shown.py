"""``omni up`` shows downloads and the loading of weights, of a stage's own process and of an engine's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.test_up import base, up
from tests.cluster.hub import MODEL, serving
from tests.engines.generation_kit import tiny_model, tiny_tokenizer

__all__ = ["base"]

PIPELINE = """\
stages: [{name: chat, process: chat, factory: "chat_stage:create", terminal: true}]
code:
  inline:
    chat_stage.py: |
      import stage_runtime as omni
      def create():
          return omni.Autoregressive(model="MODEL", own_process=OWN_PROCESS)
"""


@pytest.mark.parametrize("own_process", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_plain_lines_show_the_download_and_the_weights(own_process: bool, base: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    file = base / "pipeline.yaml"
    file.write_text(PIPELINE.replace("MODEL", MODEL).replace("OWN_PROCESS", str(own_process)))
    with serving("127.0.0.1") as hub:
        hub.has_model = True
        hub.files = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        kept = {name: value for name, value in os.environ.items() if name not in offline}
        environ = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(base / "hub")}
        with up(base, "--no-tty", file=file, environ=environ) as run:
            run.wait_for(r"answers at")
            lines = run.text.splitlines()
    shown = [line for line in lines if re.match("chat loading: chat: ", line)]
    assert any(re.search(r"model\.safetensors 100 % of \d+", line) for line in shown), lines
    assert any(re.search(r"Loading weights 100 % \((\d+) of \1\)", line) for line in shown), lines
    assert not any("it/s" in line or "█" in line for line in lines)
