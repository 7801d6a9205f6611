"""A stage with ``speculative_config``: its answers are those of one without, whatever ends or shapes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.making import loading
from stage_runtime.errors import ConfigurationError
from stage_runtime.metrics import catalog
from tests.engines.engine_kit import running
from tests.engines.generation_kit import tiny_model, tiny_tokenizer
from tests.thoroughness import crossed

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xyxyxyxyxy", 7]}},
    "required": ["a"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stopped": {"stop": ["######"]},  # the answer goes on so: a draft has tokens after it
    "shown stop": {"stop": ["######"], "include_stop_str_in_output": True},
    "two": {"n": 2, "temperature": 0.8, "seed": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "grammar": {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("gpt_neox").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def spec(checkpoint: Path, **settings: Any) -> omni.Autoregressive:
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    return omni.Autoregressive(model=str(checkpoint), params=params, max_model_len=200, **settings)


def asked() -> list[omni.OmniRequest]:
    messages = [{"role": "user", "content": "say it again and again and again"}]
    return [
        omni.OmniRequest(id=name, kind="chat", inputs={"messages": messages}, params=params)
        for name, params in ASKED.items()
    ]


def told(checkpoint: Path, **settings: Any) -> list[tuple[dict[int, str], list[Any], Any, Any]]:
    """The outcome of each request: the texts by choice, log probabilities, what it ends with, and its error."""
    found = []
    for one in omni.testing.run_stage(lambda: spec(checkpoint, **settings), asked()):
        pieces = [piece for data in one.data for piece in (data if isinstance(data, list) else [data])]
        texts: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece, omni.Text):
                texts[piece.choice] = texts.get(piece.choice, "") + piece.text
        ends = [piece for piece in pieces if isinstance(piece, omni.Usage | omni.Finish)]
        shown = [entry for piece in pieces if isinstance(piece, omni.Text) for entry in piece.logprobs or ()]
        found.append((texts, [(one["token"], one["logprob"]) for one in shown], (ends, one.result), one.error))
    return found


def test_stop_strings_choices_log_probabilities_and_grammars_are_those_of_a_stage_without(checkpoint: Path) -> None:
    without, speculating = told(checkpoint), told(checkpoint, speculative_config=NGRAM)
    for one, other in zip(speculating, without, strict=True):
        assert (one[0], one[2:]) == (other[0], other[2:])
        assert [token for token, _value in one[1]] == [token for token, _value in other[1]]
        assert [value for _token, value in one[1]] == pytest.approx([value for _token, value in other[1]], abs=1e-3)
    by_name = dict(zip(ASKED, without, strict=True))
    assert all(error is None for *_others, error in without)
    assert len(by_name["stopped"][0][0]) < len(by_name["plain"][0][0])
    assert by_name["shown stop"][0][0] == by_name["stopped"][0][0] + "######"
    assert by_name["grammar"][0][0] in ('{"a":"xyxyxyxyxy"}', '{"a": "xyxyxyxyxy"}', '{"a":7}', '{"a": 7}')
    assert len(by_name["logprobs"][1]) > 10


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "method"),
    [
        *crossed([{}, {"own_process": True}], ["ngram", "draft_model"]),
        pytest.param({"data_parallel_size": 2}, "ngram", marks=pytest.mark.nightly),  # sums: test_process_stage.py
    ],
)
def test_the_numbers_of_drafts_are_reported(checkpoint: Path, settings: dict[str, Any], method: str) -> None:
    config = NGRAM
    if method == "draft_model":
        config = {"method": method, "model": str(checkpoint), "num_speculative_tokens": 4}
    made = loading.as_engine(spec(checkpoint, speculative_config=config, **settings))
    with running(made) as rig:
        rig.ask(asked()[0])
        while rig.outbox.next()[1] != "done":
            pass
    gauges = rig.inbox.gauges
    assert set(gauges) == set(catalog.ENGINE) | set(catalog.SPECULATION)
    drafts, tokens, accepted = (gauges[name] for name in catalog.SPECULATION)
    assert 0 < drafts < gauges["steps_total"] < gauges["generated_tokens_total"] == 60
    assert drafts <= tokens <= 4 * drafts and 0 < accepted <= tokens


def test_models_with_state_and_decoders_that_make_their_own_rows_are_refused() -> None:
    refused = omni.Autoregressive(model="unused", speculative_config=NGRAM, kv_cache_bytes=1 << 20)
    with pytest.raises(ConfigurationError, match="a lfm2 model keeps state beside attention"):
        loader.assemble(refused, tiny_model("lfm2"), tiny_tokenizer())
    with pytest.raises(ConfigurationError, match="a decoder with after_step makes its own next rows"):
        loader.assemble(refused, tiny_model("llama"), tiny_tokenizer(), after_step=lambda step: None)  # type: ignore[arg-type,return-value]
