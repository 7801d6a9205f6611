"""Other engines as arms of `benchmarks.engine`: each in a process of an environment of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stage_runtime.engines.autoregressive.external import gguf_file


class Ask(msgspec.Struct, frozen=True):
    """One request: its prompt, and how many tokens are generated. after: it comes when the first has so many."""

    prompt: list[int]
    new: int
    after: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's turn at one workload. first_s, gap_s: of the arms that tell when tokens come."""

    tokens: int
    wall_s: float
    cpu_s: float
    first_s: list[float] = []
    late_s: list[float] = []  #: The same as ``first_s``, of the requests that came while others were answered.
    gaps_s: list[float] = []
    answers: list[list[int]] = []


class Other:
    """Another engine, in a process of an environment of its own."""

    def __init__(self, name: str, environment: str, settings: dict[str, Any]) -> None:
        script = Path(__file__).with_name("other_engine.py")
        self._process = subprocess.Popen(
            [f"{environment}/bin/python", str(script), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        print(f"{name}: {self._ask(settings)['version']}", file=sys.stderr)

    def __call__(self, asks: Sequence[Ask]) -> Run:
        return msgspec.convert(self._ask([(ask.prompt, ask.new) for ask in asks]), Run)

    def _ask(self, message: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"another engine has ended, exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)


def others(options: argparse.Namespace, checkpoint: str, folder: Path) -> dict[str, Other]:
    """The engines of ``--with``, each loaded."""
    settings = {
        "gguf": str(folder / "model.gguf"),
        "model": checkpoint,
        "dtype": options.dtype,
        "threads": options.threads,
        "requests": max(options.requests),
        "kv_mib": options.kv_mib,
        "prefix_caching": False,  # or a turn would find the prompts of the turn before
    }
    found = {}
    for one in options.others:
        name, _, environment = one.partition("=")
        if name not in ("openvino", "vllm", "vllm-eager"):
            raise SystemExit(f"--with {one}: no such engine; openvino, vllm, vllm-eager")
        if name == "openvino":
            gguf_file.write(checkpoint, Path(settings["gguf"]))
        found[name] = Other(name, environment, settings)
    return found
