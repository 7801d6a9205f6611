"""Two tensor-parallel ranks of a thinker answer prompts with pictures as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.qwen3_omni.thinker_rank import SHAPES, answered

ROOT = Path(__file__).parents[2]
WAIT_S = 400


@pytest.mark.timeout(600)
def test_two_ranks_give_the_tokens_of_one_for_rows_positions_and_added_rows(tiny_omni: str, tmp_path: Path) -> None:
    started = []
    try:
        for rank in range(2):
            arguments = [str(rank), "2", str(tmp_path / "meeting"), tiny_omni]
            command = [sys.executable, "-m", "tests.qwen3_omni.thinker_rank", *arguments]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            started.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        expected = answered(tiny_omni, None)
        output, errors = started[0].communicate(timeout=WAIT_S)
        assert started[0].returncode == 0, errors
        assert json.loads(output.splitlines()[-1]) == expected
        assert sorted(expected) == [str(index) for index in range(len(SHAPES))]
        assert all(expected.values())
        assert started[1].wait(WAIT_S) == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()
