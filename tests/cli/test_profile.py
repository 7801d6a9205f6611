"""``omni profile`` against a running pipeline."""

from __future__ import annotations

import json
import re
import signal
import tarfile
from pathlib import Path

import httpx
from click.testing import CliRunner, Result

from stage_runtime.cli import main
from tests.cli.test_up import PATIENCE_S, base, up

__all__ = ["base"]


def omni(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["profile", *arguments])


def ask(url: str) -> None:
    body = {"model": "hello", "messages": [{"role": "user", "content": "hello big world"}]}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code == 200


def test_a_run_is_started_stopped_listed_and_shown(base: Path) -> None:
    with up(base, environ={"PATH": "/usr/bin:/bin", "OMNI_PROFILE_ROOT": str(base / "profiles")}) as program:
        url = program.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        program.wait_for("curl")
        here = ("--base-path", str(base))
        early = omni("report", *here)
        assert (early.exit_code, early.stderr) == (1, "error: no profile has been taken: omni profile start\n")
        assert omni("start", "--run", "demo", *here).output == "recording demo; `omni profile stop` ends it\n"
        ask(url)
        assert omni("stop", "--url", url).output == "demo was recorded\n"
        assert re.fullmatch(r"demo  [-0-9]+ [:0-9]+  stopped\n", omni("list", *here).output)
        shown = omni("report", *here).output
        assert shown.startswith("demo: 1 requests, ")
        assert re.search(r"│ split +│ shout +│ payload +│ +1 │", shown)
        out = base / "report"
        assert omni("report", "--format", "json", "--out", str(out), *here).exit_code == 0
        assert json.loads(out.read_text())["request_count"] == 1
        assert omni("report", "--format", "tar", "--out", str(out), *here).exit_code == 0
        with tarfile.open(out) as files:
            assert files.getnames()
        again = omni("report", "--run", "other", *here)
        assert again.exit_code == 1
        assert (
            again.stderr == f"error: {url}/profiles/other/report?format=table: no profile run 'other' is known here\n"
        )
        empty = omni("run", "--seconds", "0.2", *here).output
        assert re.match(r"run-[-0-9]+: 0 requests, 0 events of 3 processes\nNo request was recorded: ", empty)
        program.program.send_signal(signal.SIGINT)
        program.program.wait(PATIENCE_S)
    nobody = omni("list", "--url", url)
    assert nobody.exit_code == 1 and nobody.stderr.startswith(f"error: {url}: ")
