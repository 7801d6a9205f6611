"""`omni.Encoder` with tiny models: vectors and scores are those of transformers alone, however requests are batched."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as untyped

import stage_runtime as omni
from stage_runtime.engines import encoding
from stage_runtime.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from stage_runtime.wire.values import OmniRequest, Scores, StagePayload, Usage, Vectors
from tests.engines.generation_kit import VOCABULARY, tiny_tokenizer

transformers: Any = untyped
TEXTS = ["hello there", "a", "it rains and it rains"]


@functools.cache
def model(kind: str) -> Any:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    made: Any = getattr(transformers, kind).from_config(config)
    return made.eval()


def encoder(*, types: bool = False, **settings: Any) -> encoding.EncoderModel:
    """types: the tokenizer gives each token of a text the type of its text, as BERT's does."""
    spec = omni.Encoder(model="", **settings)
    kind = "AutoModelForSequenceClassification" if spec.scores else "AutoModel"
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    if types:
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return encoding.EncoderModel(spec, model(kind), tokenizer)


def payload(data: Any) -> StagePayload:
    return StagePayload(request=OmniRequest(id="r", kind="embedding", inputs=data), data=data)


def alone(text: str, pooling: str) -> Any:
    """The vector of one text, by transformers without padding."""
    tokens = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
    with torch.inference_mode():
        hidden = model("AutoModel")(input_ids=tokens).last_hidden_state[0]
    row = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return row / row.norm()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("most", [1, 24, 8192])
def test_vectors_do_not_depend_on_what_is_batched_with_them(pooling: str, most: int) -> None:
    made = encoder(pooling=pooling, max_batched_tokens=most)
    first, second = made.run([payload({"texts": TEXTS[:2]}), payload({"texts": TEXTS[2:]})])
    assert isinstance(first[0], Vectors) and isinstance(second[0], Vectors)
    found = torch.cat([first[0].values, second[0].values])
    torch.testing.assert_close(found, torch.stack([alone(text, pooling) for text in TEXTS]), atol=1e-5, rtol=1e-4)
    assert [first[1], second[1]] == [Usage(12), Usage(21)]


@pytest.mark.parametrize("types", [False, True])
def test_token_ids_give_the_vector_of_their_text_also_beside_it(types: bool) -> None:
    tokens = tiny_tokenizer()("hello there")["input_ids"]
    asked = [payload({"tokens": [tokens]}), payload({"texts": ["hello there"]})]
    for order in (asked, asked[::-1]):
        [[first, _], [second, _]] = encoder(types=types).run(order)
        torch.testing.assert_close(first.values, second.values)


def test_scores_are_the_probabilities_of_a_cross_encoder() -> None:
    [[found, usage]] = encoder(scores=True).run([payload({"pairs": [["who", "me"], ["who", "it rains"]]})])
    tokenizer = tiny_tokenizer()
    expected = []
    for pair in (("who", "me"), ("who", "it rains")):
        made = tokenizer(*pair, return_tensors="pt")
        kept = {name: made[name] for name in ("input_ids", "token_type_ids") if name in made}
        with torch.inference_mode():
            expected.append(float(model("AutoModelForSequenceClassification")(**kept).logits.sigmoid()))
    assert isinstance(found, Scores)
    assert found.values == pytest.approx(expected, abs=1e-5)
    assert usage == Usage(16)


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        ({"texts": ["x" * 65]}, ContextLengthExceeded, "64 tokens"),
        ({"tokens": [[1, VOCABULARY]]}, InvalidRequest, f"not token {VOCABULARY}"),
        ({"texts": []}, InvalidRequest, "expected a list of texts for omni.Encoder, got an empty one"),
        ("hello", InvalidRequest, "expected a list of texts"),
        ({"texts": [["a"]]}, InvalidRequest, "expected a text each, got list"),
        ({"texts": [""]}, InvalidRequest, "expected one token or more each, got none"),
        ({"tokens": [[1], []]}, InvalidRequest, "expected one token or more each, got none"),
        ({"tokens": [7]}, InvalidRequest, "expected a list of token ids each, got int"),
    ],
)
@pytest.mark.parametrize("most", [1, 8192])
def test_a_wrong_request_fails_alone(data: Any, error: type[Exception], problem: str, most: int) -> None:
    wrong, right = encoder(max_batched_tokens=most).run([payload(data), payload({"texts": ["a"]})])
    assert isinstance(wrong, error) and problem in str(wrong)
    assert isinstance(right[0], Vectors)


@pytest.mark.parametrize("pair", ["ab", ["a"], ["a", "b", "c"], ["a", None], [["a"], "b"], {"text": "a"}, []])
def test_a_pair_that_is_not_two_texts_fails_alone(pair: Any) -> None:
    wrong, right = encoder(scores=True).run([payload({"pairs": [pair]}), payload({"pairs": [["a", "b"]]})])
    assert isinstance(wrong, InvalidRequest) and "expected two texts each" in str(wrong)
    assert isinstance(right[0], Scores)


@pytest.mark.parametrize(("kind", "longest"), [("Bert", 64), ("Roberta", 62), ("XLMRobertaXL", 62), ("MPNet", 62)])
def test_a_text_has_as_many_tokens_as_its_model_has_positions(kind: str, longest: int) -> None:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64,
    )  # fmt: skip
    made = encoding.EncoderModel(
        omni.Encoder(model=""), transformers.AutoModel.from_config(config).eval(), tiny_tokenizer()
    )
    right, wrong = made.run([payload({"tokens": [[5] * longest]}), payload({"tokens": [[5] * (longest + 1)]})])
    assert isinstance(right[0], Vectors)
    assert isinstance(wrong, ContextLengthExceeded)


def test_an_unknown_pooling_is_refused_when_the_stage_is_loaded() -> None:
    with pytest.raises(ConfigurationError, match="expected one of auto, mean, cls, last"):
        encoding.load(omni.Encoder(model="m", pooling="max"))


def test_a_dtype_is_chosen_or_refused_by_name_when_the_stage_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, {"pooling_mode": "mean"})
    for wrong in ("fp16", "int8"):
        with pytest.raises(ConfigurationError, match="expected one of auto, float32, bfloat16, float16"):
            encoding.load(omni.Encoder(model=str(tmp_path), dtype=wrong))
    encoding.load(omni.Encoder(model=str(tmp_path), dtype="auto"))


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
@pytest.mark.parametrize("of_hub", [False, True])
def test_a_checkpoint_of_sentence_transformers_says_its_pooling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], pooling: str, of_hub: bool
) -> None:
    folder = tmp_path / "models--omni--tiny/snapshots/1234"
    saved(folder, said)
    (tmp_path / "models--omni--tiny/refs").mkdir()
    (tmp_path / "models--omni--tiny/refs/main").write_text("1234")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    made = encoding.load(omni.Encoder(model="omni/tiny" if of_hub else str(folder)))
    [[found, _]] = made.run([payload({"texts": TEXTS[:1]})])
    torch.testing.assert_close(found.values[0], alone(TEXTS[0], pooling), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"pooling_mode_max_tokens": True}, "max_tokens;"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token and mean_tokens;"),
    ],
)
def test_a_checkpoint_with_a_pooling_of_another_kind_is_refused(
    tmp_path: Path, said: dict[str, Any], named: str
) -> None:
    saved(tmp_path, said)
    with pytest.raises(ConfigurationError, match=named):
        encoding.load(omni.Encoder(model=str(tmp_path)))
    encoding.load(omni.Encoder(model=str(tmp_path), pooling="mean"))


def saved(folder: Path, said: dict[str, Any]) -> None:
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(said))
    model("AutoModel").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
