"""A factory in a process of its own is called with a class's instance, with None, and on a machine without GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from omnipipeline_spec.pipeline import Code, PipelineConfig, StageConfig
from tests.e2e.local_pipelines import Client, running

FACTORY = """\
def make(model_path="own-model", model_revision="main", gpu_id=7, unset="own", said="own", size=1):
    arguments = [model_path, model_revision, gpu_id, unset, said, size]
    return lambda payload: arguments
"""


class Family(PipelineConfig, frozen=True, kw_only=True):
    """Its defaults must not come back where an instance says something else."""

    model_path: str | None = "class/model"
    model_revision: str | None = "class-revision"
    stages: Sequence[StageConfig] = (
        StageConfig(name="only", process="p", factory="recording:make", factory_args={"size": 2}, terminal=True),
        StageConfig(name="gone", process="q", factory="nowhere:make", terminal=True),
    )


@pytest.mark.proves("every-form")
async def test_a_factory_gets_the_values_set_in_python_and_its_own_defaults_for_the_rest(base: Path) -> None:
    stage = StageConfig(
        name="only", process="p", factory="recording:make", gpu=0, factory_args={"said": 1}, terminal=True
    )
    spec = Family(
        name="arguments",
        model_path=None,
        stages=[stage],
        runtime_overrides={"only": {"said": None}},
        code=Code(inline={"recording.py": FACTORY}),
    )
    async with running(spec, base, cpu=True) as pipeline, Client(pipeline.url) as client:
        answer = await client.ask("x")
        assert answer["results"]["only"] == ["own-model", "class-revision", None, "own", None, 1]
