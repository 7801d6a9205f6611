"""Authors' changes to logging cost them no request and no line of the runtime's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.e2e.local_pipelines import PATIENCE_S, eventually, running

PIPELINE = """
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: chatty}
spec:
  code:
    inline:
      chatty.py: |
        import logging
        import logging.config
        import pathlib
        import time

        def raises(record):
            raise LookupError("no request id")

        def load(mode, go_on):
            root = logging.getLogger()
            if mode == "filter":
                root.handlers[0].addFilter(raises)
            else:
                logging.config.dictConfig({"version": 1, "root": {"level": "INFO", "handlers": []}})

            def echo(payload):
                if payload.data == "fail":
                    raise ValueError("the cause")
                while payload.data == "wait" and not pathlib.Path(go_on).exists():
                    time.sleep(0.01)
                return payload.data

            return echo
  stages:
  - {name: echo, process: only, factory: "chatty:load", factoryArgs: {mode: MODE, go_on: GO_ON}, terminal: true}
"""


@pytest.mark.parametrize("mode", ["filter", "dictConfig"])
async def test_a_failure_is_logged_and_a_drain_ends_in_order(mode: str, base: Path, tmp_path: Path) -> None:
    file, go_on, log = tmp_path / "chatty.yaml", tmp_path / "go-on", base / "log"
    file.write_text(PIPELINE.replace("MODE", mode).replace("GO_ON", str(go_on)))
    async with running(file, base) as pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http:
        pids = pipeline.pids()
        failed = await http.post("/v1/pipeline", json={"inputs": "fail"})
        assert failed.status_code == 500
        await eventually(lambda: "failed in echo.run: ValueError: the cause" in log.read_text())
        assert pipeline.pids() == pids
        waiting = asyncio.create_task(http.post("/v1/pipeline", json={"inputs": "wait"}))

        async def is_there() -> bool:
            return bool((await http.get("/status")).json()["in_flight"] == 1)

        await eventually(is_there)
        stopping = asyncio.create_task(pipeline.stop())
        await eventually(lambda: any(view.state == "draining" for view in pipeline.views()))
        go_on.touch()
        answer = await waiting
        assert answer.status_code == 200, answer.text
        await stopping
    assert "Traceback" not in log.read_text().replace("Traceback (most recent call last)", "", 1)
