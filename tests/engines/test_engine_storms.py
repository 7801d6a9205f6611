"""Everything at once: NaN, bad grammars, prompts too long, rows that do not fit, aborts, and too few blocks for all.

Only the requests concerned end, the others get the tokens that transformers gives to each alone, all blocks come back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stage_runtime as omni
from stage_runtime.engines.making import loading
from tests.engines.engine_kit import running
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer

POISON = 61  # a token whose embedding is NaN; no sound prompt and no answer has it
PATIENCE_S = 100.0
BLOCKS = 30  # of 4 tokens
REFUSALS = {"InvalidRequest", "RequestError", "GrammarRefused", "ContextLengthExceeded"}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, their size, bytes of a float
BAD: dict[str, Any] = {
    "grammar": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
    "nan": {"tokens": [5, POISON, 6]},
    "long": {"tokens": [1] * 100_000},
    "unknown": {"tokens": [9999]},
    "rows": {"rows": torch.zeros(3, 31)},
    "infinite": {"rows": torch.full((3, 32), float("inf"))},
    "raises": {"raises": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poisoned")
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def prompt(payload: omni.StagePayload) -> omni.Prompt:
    data = payload.data
    if data.get("raises"):
        raise KeyError("no such thing")
    tokens = data.get("tokens", [1, 2, 3])
    parts = [tokens, data["rows"]] if "rows" in data else [tokens]
    wanted = {name: data[name] for name in ("response_format", "max_tokens") if name in data}
    return omni.Prompt(parts=parts, params={"temperature": 0, **wanted})


def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if generation.tokens:
        yield omni.Chunk(list(generation.tokens))
    if generation.finish is not None:
        yield omni.Result(generation.finish)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", [{}, {"own_process": True}], ids=["in the stage", "own process"])
def test_in_a_storm_only_the_requests_concerned_end_and_all_blocks_come_back(
    checkpoint: Path, where: dict[str, Any]
) -> None:
    spec = omni.Autoregressive(
        model=str(checkpoint),
        prompt=prompt,
        deliver=deliver,
        params={"max_tokens": 12, "ignore_eos": True},
        block_size=4,
        max_requests=8,
        max_batched_tokens=32,
        max_chunk=8,
        kv_cache_bytes=BLOCKS * 4 * TOKEN_BYTES,  # a few requests at once
        threads=1,
        kernels="torch",
        **where,
    )
    draw = random.Random(4)
    drawn = ([draw.randrange(20, 60) for _ in range(draw.randrange(1, 40))] for _ in range(16))
    expected = {f"sound {n}": (ids, alone("llama", ids, 12)) for n, ids in enumerate(drawn)}
    sound = {name: ids for name, (ids, answer) in expected.items() if POISON not in answer}
    assert len(sound) > 10
    aborted = [f"aborted {n}" for n in range(40)]
    whole = [draw.randrange(20, 60) for _ in range(4 * BLOCKS - 3)]
    names = [*sound, *aborted, *(f"{kind} {n}" for kind in BAD for n in range(3))]
    draw.shuffle(names)
    given: dict[str, list[int]] = {name: [] for name in names}
    ends: dict[str, str] = {}
    with running(loading.as_engine(spec)) as rig:
        for name in names:
            kind = name.split()[0]
            if kind == "sound":
                rig.start(name, {"tokens": sound[name]})
            elif kind == "aborted":
                rig.start(name, {"tokens": [draw.randrange(20, 60) for _ in range(20)], "max_tokens": 12})
            else:
                rig.start(name, BAD[kind])
            if kind == "aborted":
                for one in draw.sample(aborted, 2):
                    if one in rig.works:
                        rig.abort(one)
        while len(ends) < len(names) - len(aborted):
            name, what, *output = rig.outbox.outputs.get(timeout=PATIENCE_S)
            if what == "chunk":
                given[name] += output[0]
            elif name not in aborted:
                ends[name] = what if what == "done" else output[0]
        for one in aborted:
            rig.abort(one)
        rig.start("last", {"tokens": whole, "max_tokens": 2})  # needs every block
        while (found := rig.outbox.outputs.get(timeout=PATIENCE_S))[:2] != ("last", "done"):
            given.setdefault(found[0], []).extend(found[2])
    assert given["last"] == alone("llama", whole, 2)
    assert {name: given[name] for name in sound} == {name: expected[name][1] for name in sound}
    assert {name: end for name, end in ends.items() if name in sound} == dict.fromkeys(sound, "done")
    failed = {name: end.partition(":")[0] for name, end in ends.items() if name not in sound}
    assert len(failed) == 3 * len(BAD)
    codes = {"raises": {"KeyError"}}  # as any other exception of an author's it becomes stage_failed
    for name, kind in failed.items():
        assert kind in codes.get(name.split()[0], REFUSALS)
    assert rig.inbox.gauges["kv_blocks"] == BLOCKS
