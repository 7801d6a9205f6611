"""Children of a run's processes end with the run, or with their parents, whoever is killed and however."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.test_up import PATIENCE_S, Run, base, eventually, up

__all__ = ["base"]

SPEC = """\
stages: [{name: leaving, process: leaving, factory: "leaving:create", terminal: true}]
"""
LEFT = 6  # a child, one in a session of its own, an orphan, a spawned one with its resource tracker, a forked one


@pytest.fixture
def spec(base: Path) -> Path:
    file = base / "pipeline.yaml"
    file.write_text(SPEC)
    return file


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Marked, so that whatever it is inherited by can be found."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    mark = secrets.token_hex(8)
    yield {**os.environ, "PYTHONPATH": path, "LEFTOVERS_OF": mark}
    for process in marked(mark):  # of a test that has failed
        process.kill()


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LEFTOVERS_OF") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found


def reaper_of(run: Run) -> psutil.Process:
    children = psutil.Process(run.program.pid).children()
    (found,) = [one for one in children if any("reaper.py" in word for word in one.cmdline())]
    return found


def started(run: Run, mark: str) -> str:
    url = run.wait_for(r"answers at (\S+)").group(1)
    eventually(lambda: len(marked(mark)) >= 3 + LEFT)  # the program, coordinator and stage
    return url


@pytest.mark.proves("interrupt")
def test_a_killed_program_leaves_no_grandchild(base: Path, spec: Path, environ: dict[str, str]) -> None:
    mark = environ["LEFTOVERS_OF"]
    with up(base, file=spec, environ=environ) as run:
        started(run, mark)
        reaper = reaper_of(run)
        run.program.kill()
        eventually(lambda: not marked(mark))
        eventually(lambda: not reaper.is_running())


def test_a_run_that_ends_in_order_leaves_no_grandchild(base: Path, spec: Path, environ: dict[str, str]) -> None:
    with up(base, file=spec, environ=environ) as run:
        started(run, environ["LEFTOVERS_OF"])
        run.program.terminate()
        run.program.wait(PATIENCE_S)
        assert marked(environ["LEFTOVERS_OF"]) == []


@pytest.mark.proves("interrupt")
def test_a_killed_stage_takes_what_it_has_started_along_and_nothing_else(
    base: Path, spec: Path, environ: dict[str, str]
) -> None:
    mark = environ["LEFTOVERS_OF"]
    with up(base, file=spec, environ=environ) as run:
        url = started(run, mark)
        pid = ask(url)
        before = set(marked(mark))
        psutil.Process(pid).kill()
        eventually(lambda: ask(url) not in (None, pid))
        eventually(lambda: len(marked(mark)) == len(before))
        kept = before & set(marked(mark))
        assert len(kept) == 2, "the program and its coordinator"
        run.program.kill()


@pytest.mark.proves("interrupt")
def test_what_a_program_killed_with_its_reaper_has_left_is_ended_by_the_next_run(
    base: Path, spec: Path, environ: dict[str, str]
) -> None:
    mark = environ["LEFTOVERS_OF"]
    with up(base, file=spec, environ=environ) as run:
        started(run, mark)
        left = marked(mark)
        reaper_of(run).kill()
        run.program.kill()
        run.program.wait()
        eventually(lambda: sum(one.is_running() for one in left) <= LEFT)
        assert marked(mark), "without a reaper they live on: what the other tests show is its work"
    with up(base, environ={**os.environ, "LEFTOVERS_OF": "of the next run"}) as following:
        following.wait_for("answers at")
        assert marked(mark) == []


def ask(url: str) -> int | None:
    try:
        answer = httpx.post(f"{url}/v1/pipeline", json={"inputs": "x"}, timeout=PATIENCE_S)
        found: int = answer.json()["results"]["leaving"]
        return found
    except (httpx.HTTPError, KeyError):
        return None
