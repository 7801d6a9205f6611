"""Prompts of embeddings and hidden rows of answers between a client and an engine's process.

The engine overlaps steps as its factory says, so these tests run once (`test_prompt_rows` runs each way).
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from stage_runtime.engines.autoregressive.clients.sync_mp import SyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import SchedulerStats
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import ROW, Extension
from tests.engines.generation_kit import GREEDY, VOCABULARY, alone, rows_of
from tests.patience import patience

PATIENCE_S = patience(100.0)


@pytest.mark.long
def test_rows_cross_a_process_boundary_both_ways_and_a_prompt_grows_there() -> None:
    draw = random.Random(5)
    prompt = [draw.randrange(VOCABULARY) for _ in range(40)]
    rows = rows_of("llama", prompt)
    params = msgspec.structs.replace(GREEDY, hidden_rows=True)
    launch = EngineLaunch(factory="tests.engines.tiny_engine:tiny")
    given: dict[str, list[int]] = {name: [] for name in ("whole", "grown", "bad")}
    hidden: dict[str, list[Any]] = {name: [] for name in given}
    refused: dict[str, str] = {}
    with SyncMPClient(launch) as client:
        client.add_request(
            EngineCoreRequest(request_id="whole", prompt_token_ids=[ROW] * 40, prompt_embeds=rows, params=params)
        )
        for name in ("grown", "bad"):
            client.add_request(EngineCoreRequest(request_id=name, prompt_token_ids=[], params=params, open=True))
        client.extend_request("bad", Extension(prompt_token_ids=[ROW], prompt_embeds=torch.zeros(1, 3)))
        for at in range(0, 40, 7):
            part = rows[at : at + 7]
            client.extend_request("grown", Extension(prompt_token_ids=[ROW] * len(part), prompt_embeds=part))
        client.extend_request("grown", Extension(last=True))
        left = set(given)
        while left:
            outputs = client.get_output(PATIENCE_S)
            for one in outputs.outputs:
                given[one.request_id] += one.new_token_ids
                hidden[one.request_id] += one.hidden_rows
                left -= {one.request_id} if one.finish is not None else set()
            left -= {one.request_id for one in outputs.refused}
            refused.update({one.request_id: one.message for one in outputs.refused})
        client.extend_request("grown", Extension(last=True))  # it has ended: no error, no output
        stats = msgspec.convert(client.call_utility("stats", timeout_s=PATIENCE_S), SchedulerStats)
        assert stats.kv_blocks_used == 0
    expected = alone("llama", prompt, 12)
    assert given == {"whole": expected, "grown": expected, "bad": []}
    assert torch.allclose(torch.stack(hidden["whole"]), torch.stack(hidden["grown"]), atol=1e-4)
    assert list(refused) == ["bad"] and "[1, 3]" in refused["bad"]
