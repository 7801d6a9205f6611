"""The real engine core with tiny weights behind the boundary: the tokens of transformers' own ``generate``."""

from __future__ import annotations

import pytest

from stage_runtime.engines.autoregressive.clients.sync_mp import SyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from tests.engines.generation_kit import GREEDY, alone

PATIENCE_S = 100.0


@pytest.mark.nightly  # test_engine_storms.py has a stage with such an engine each time
def test_greedy_tokens_across_the_boundary_equal_those_of_generate() -> None:
    prompts = {"a": [1, 2, 3], "b": list(range(40, 60)), "c": [200]}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    with SyncMPClient(EngineLaunch(factory="tests.engines.tiny_engine:tiny")) as client:
        for name, prompt in prompts.items():
            client.add_request(EngineCoreRequest(request_id=name, prompt_token_ids=prompt, params=GREEDY))
        while client.reqs_in_flight:
            for output in client.get_output(PATIENCE_S).outputs:
                tokens[output.request_id] += output.new_token_ids
    assert tokens == {name: alone("llama", prompt, GREEDY.max_tokens) for name, prompt in prompts.items()}
