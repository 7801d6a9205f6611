"""Threads that help with compiled loops: every part is computed once, whoever comes, leaves or forks meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from stage_runtime.engines.autoregressive.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs numba")

ROWS, DIM = 64, 64


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def activated(rows: torch.Tensor) -> torch.Tensor:
    """A loop in as many parts as there are rows."""
    from stage_runtime.engines.autoregressive.kernels import loops

    out = rows.new_empty(rows.shape[0], DIM)
    loops.silu_multiply(False)(rows.shape[0], rows.data_ptr(), out.data_ptr(), rows.shape[0], DIM)
    return out


def expected(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(rows[:, :DIM]) * rows[:, DIM:]


def all_right(rounds: int) -> bool:
    rows = torch.randn(ROWS, 2 * DIM)
    right = expected(rows)
    return all(torch.allclose(activated(rows), right, atol=1e-5) for _ in range(rounds))


@pytest.mark.usefixtures("three_threads")
def test_loops_run_one_after_the_other_are_whole_when_they_return() -> None:
    assert all_right(2000)


@pytest.mark.usefixtures("three_threads")
def test_loops_of_several_threads_at_the_same_time_are_whole() -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(all_right(300))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


@pytest.mark.usefixtures("three_threads")
def test_a_closed_team_s_loops_are_whole_without_help() -> None:
    from stage_runtime.engines.autoregressive.kernels import helpers, loops

    team = helpers.Team(2)
    team.close()
    rows = torch.randn(ROWS, 2 * DIM)
    out = rows.new_zeros(ROWS, DIM)
    loop = loops.silu_multiply(False)
    data = torch.tensor([0, ROWS, rows.data_ptr(), out.data_ptr(), ROWS, DIM])
    assert team.run(loop.address, data.data_ptr())
    assert torch.allclose(out, expected(rows), atol=1e-5)


@pytest.mark.parametrize("started", [0, 1])
def test_a_team_has_the_helpers_that_could_start(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that runs reads the memory of its team, which must be there."""
    from stage_runtime.engines.autoregressive.kernels import helpers, loops

    start, left = threading.Thread.start, [True] * started

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("loop helper") and not (left and left.pop()):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    team = helpers.Team(2)
    rows = torch.randn(ROWS, 2 * DIM)
    out = rows.new_zeros(ROWS, DIM)
    loop = loops.silu_multiply(False)
    for _ in range(100):
        data = torch.tensor([0, ROWS, rows.data_ptr(), out.data_ptr(), ROWS, DIM])
        assert team.run(loop.address, data.data_ptr())
    assert torch.allclose(out, expected(rows), atol=1e-5)
    assert len(team._threads) == started
    team.close()


#: A process that used helpers, a fork of it that uses them again, and the end of both.
FORKING = """
import os, torch
from tests.engines import test_loop_helpers as here
torch.set_num_threads(3)
assert here.all_right(20)
child = os.fork()
if child == 0:
    os._exit(0 if here.all_right(20) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done", flush=True)
"""


def test_a_forked_process_has_helpers_of_its_own_and_both_end() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", FORKING], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
