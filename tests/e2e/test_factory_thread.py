"""The thread in which a factory runs, and how what it has opened is released."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.local_pipelines import Client, running

PIPELINE = """
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: releasing}
spec:
  code:
    inline:
      releasing.py: |
        import atexit
        import signal
        import threading

        def load():
            atexit.register(lambda: print("released", flush=True))
            try:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                raised = None
            except ValueError as error:
                raised = str(error)
            thread = threading.current_thread()
            return lambda payload: [raised, thread is threading.main_thread(), thread is threading.current_thread()]
  stages:
  - {name: only, process: only, factory: "releasing:load", terminal: true}
"""


async def test_a_factory_runs_on_its_stage_s_thread_and_atexit_releases_what_it_has_opened(
    base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "releasing.yaml"
    file.write_text(PIPELINE)
    async with running(file, base) as pipeline, Client(pipeline.url) as client:
        raised, main, own = (await client.ask("hello"))["results"]["only"]
        assert raised.startswith("signal only works in main thread")
        assert (main, own) == (False, True)
        assert "only: released" not in (base / "log").read_text()
    assert (base / "log").read_text().count("only: released") == 1
