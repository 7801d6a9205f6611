"""Pictures of a real pipeline, asked for by the official client; files of over 16 KiB go from the stage by relay."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import openai
import pytest

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import PATIENCE_S, running


def size_of(png: bytes) -> tuple[int, ...]:
    assert png.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", png[16:24])


async def test_a_stage_s_pictures_reach_the_official_client_and_come_back_to_be_edited(base: Path) -> None:
    stages = [StageConfig(name="draw", process="draw", factory="picture_stages:draw", terminal=True)]
    config = PipelineConfig(name="pictures", serves=["image"], stages=stages)
    async with (
        running(config, base) as pipeline,
        openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        made = await client.images.generate(model="m", prompt="a cat", n=2, size="640x480")
        files = [base64.b64decode(one.b64_json or "") for one in made.data or []]
        assert [size_of(png) for png in files] == [(640, 480)] * 2
        assert len(set(files)) == 2
        assert sum(map(len, files)) > 16 << 10
        edited = await client.images.edit(model="m", image=("cat.png", files[0]), prompt="a hat")
        [hat] = [base64.b64decode(one.b64_json or "") for one in edited.data or []]
        assert size_of(hat) == (640, 480)
        assert hat not in files
        with pytest.raises(openai.BadRequestError, match="at most 1048576 pixels") as refused:
            await client.images.generate(model="m", prompt="a cat", size="9000x9000")
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["stage"] == "draw"
