"""A failing step leaves a file that says what was computed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.core.step_dumps import MOST_FILES, StepDumps
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.generation_kit import VOCABULARY, Answers, ScriptedExecutor

SECRET = 77


def failing(dumps: StepDumps) -> tuple[Answers, ScriptedExecutor]:
    executor = ScriptedExecutor(lambda tokens: SECRET + 1)
    scheduler = Scheduler(SchedulerLimits(block_size=4, max_model_len=120), BlockPool(64))
    core = EngineCore(scheduler, executor, ModelFacts(VOCABULARY), dumps=dumps)
    return Answers(core), executor


def fail(answers: Answers, executor: ScriptedExecutor, name: str) -> None:
    answers.ask(name, [SECRET] * 5)
    answers.step()
    executor.step_errors = [MemoryError("no room")]
    answers.step()


def dumped(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def test_a_failed_step_leaves_its_batch_lengths_blocks_and_last_outputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers, executor = failing(StepDumps(tmp_path / "steps"))
    fail(answers, executor, "a")
    (found,) = dumped(tmp_path / "steps")
    (row,) = found["rows"]
    assert (row["request"], row["start"], row["count"], row["prompt_tokens"], row["generated"]) == ("a", 5, 1, 5, 1)
    assert len(row["blocks"]) == 2
    assert found["failed"] == {"a": "MemoryError: no room"}
    assert found["last_steps"] == [{"step": 1, "rows": 1, "sampled": 1, "failed": 0}]
    (path,) = (tmp_path / "steps").iterdir()
    assert any(str(path) in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("tokens", [False, True])
def test_token_ids_are_in_a_dump_only_where_they_are_asked_for(tmp_path: Path, tokens: bool) -> None:
    answers, executor = failing(StepDumps(tmp_path, tokens=tokens))
    fail(answers, executor, "a")
    (found,) = dumped(tmp_path)
    assert ("tokens" in found["rows"][0], "tokens" in found["last_steps"][0]) == (tokens, tokens)
    if tokens:
        assert found["rows"][0]["tokens"] == [*[SECRET] * 5, SECRET + 1]


def test_a_request_that_fails_in_the_model_leaves_a_dump_and_the_number_is_bounded(tmp_path: Path) -> None:
    answers, executor = failing(StepDumps(tmp_path))
    for index in range(MOST_FILES + 3):
        executor.row_errors = {str(index): "NaN"}
        answers.ask(str(index), [1])
        answers.run()
    found = dumped(tmp_path)
    assert [one["failed"] for one in found] == [{str(index): "NaN"} for index in range(3, MOST_FILES + 3)]


def test_a_folder_that_cannot_be_written_fails_no_other_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers, executor = failing(StepDumps(tmp_path / "file"))
    fail(answers, executor, "a")
    answers.ask("b", [1])
    answers.step()
    assert answers.tokens["b"] == [SECRET + 1]
