"""A profile of a language model and of a stage that speaks: what their own events open and close is in the report."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import PATIENCE_S, Client, running
from tests.engines.generation_kit import tiny_model, tiny_tokenizer

TEXTS = ["a", "the quick brown fox", "zzz" * 9]


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_first_chunk_and_the_first_sound_are_measured_from_the_prefill_and_the_run(
    base: Path, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    spec = PipelineConfig(
        name="sounding",
        stages=[
            StageConfig(
                name="words",
                process="words",
                factory="sounding_stages:words",
                factory_args={"model": str(tmp_path)},
                next="sound",
                stream_to="sound",
            ),
            StageConfig(name="sound", process="sound", factory="sounding_stages:sound", terminal=True),
        ],
    )
    environ = {"OMNI_PROFILE_ROOT": str(base / "profiles")}
    async with (
        running(spec, base, environ=environ) as pipeline,
        Client(pipeline.url) as client,
        httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http,
    ):
        assert (await http.post("/start_request_profile", json={"run_id": "run"})).json()["complete"]
        for text in TEXTS:
            await client.ask(text)
        assert (await http.post("/stop_request_profile", json={})).json()["complete"]
        report = (await http.get("/profiles/run/report")).json()
    counts = {
        (each["stage"], each["open_event"], each["close_event"]): each["count"] for each in report["stage_breakdown"]
    }
    wanted = [
        ("words", "scheduler_queue_enter", "scheduler_prefill_start"),
        ("words", "scheduler_prefill_start", "scheduler_first_emit"),
        ("words", "scheduler_prefill_start", "stage_first_stream_chunk_sent"),
        ("words", "stage_run_start", "stage_first_stream_chunk_sent"),
        ("sound", "stage_run_start", "code2wav_first_audio"),
    ]
    assert {pair: counts.get(pair, 0) for pair in wanted} == dict.fromkeys(wanted, len(TEXTS))
