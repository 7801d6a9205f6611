"""A torch trace of a stage whose engines are processes of their own: theirs are written and fetched with the rest."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import httpx
import pytest

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import PATIENCE_S, Client, running
from tests.engines.generation_kit import tiny_model, tiny_tokenizer


@pytest.mark.nightly  # three traces take a minute; engines/test_engine_process.py has one of them each time
@pytest.mark.timeout(300)
async def test_every_engine_process_writes_its_part_of_a_torch_trace(base: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    words = StageConfig(
        name="words",
        process="words",
        factory="sounding_stages:words",
        factory_args={"model": str(tmp_path), "data_parallel_size": 2},
        terminal=True,
    )
    spec = PipelineConfig(name="traced", stages=[words])
    async with (
        running(spec, base, environ={"OMNI_PROFILE_ROOT": str(base / "profiles")}) as pipeline,
        Client(pipeline.url) as client,
        httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http,
    ):
        body = {"run_id": "deep", "trace_path_template": "mine/{stage}_{rank}_{pid}"}
        assert (await http.post("/start_profile", json=body)).json()["complete"]
        for text in ("a", "b", "c", "d"):
            await client.ask(text)
        assert (await http.post("/stop_profile", json={"run_id": "deep"})).json()["complete"]
        archive = await http.get("/profiles/deep")
        for text in ("a", "b"):  # serving goes on
            await client.ask(text)
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as files:
        traces = {
            Path(name).name.rsplit("_", 1)[0]: gzip.decompress(file.read())
            for name in files.getnames()
            if name.endswith(".trace.json.gz") and (file := files.extractfile(name)) is not None
        }
    assert sorted(traces) == ["words-engine_0", "words-engine_1", "words_0"]
    for rank in (0, 1):
        events = json.loads(traces[f"words-engine_{rank}"])["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events), "its steps are in its trace"
