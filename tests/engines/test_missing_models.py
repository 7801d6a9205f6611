"""A model that is not there: the error says what may be given instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines import encoding
from stage_runtime.engines.autoregressive.model import models
from stage_runtime.errors import ConfigurationError


def vectors(model: str) -> Any:
    return encoding.load(omni.Encoder(model=model))


READERS = [models.load_tokenizer, models.load_model, models.load_configs, vectors]
everywhere = pytest.mark.parametrize("read", READERS)


@everywhere
@pytest.mark.parametrize("model", ["/no/such/folder", "./gone", "~/gone"])
def test_a_folder_that_does_not_exist_is_not_taken_for_a_name_at_the_hub(
    model: str, read: Callable[[str], Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"does not exist: give a checkpoint's folder"):
        read(model)


@everywhere
def test_what_is_not_a_checkpoint_is_refused_by_its_path(tmp_path: Path, read: Callable[[str], Any]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.safetensors").write_bytes(b"")
    for name, problem in {
        "empty": "this folder has no config.json, so it is not a checkpoint",
        "weights.safetensors": "this file is not a checkpoint",
        "gone.gguf": "this file does not exist",
    }.items():
        with pytest.raises(ConfigurationError) as raised:
            read(str(tmp_path / name))
        assert str(raised.value).startswith(f"model {str(tmp_path / name)!r}: {problem}: give a checkpoint's folder")
    with pytest.raises(ConfigurationError, match=r"^model '': this text is empty: give a checkpoint's folder"):
        read("")


def test_a_checkpoint_without_a_tokenizer_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigurationError, match=r"this folder has no tokenizer\.json"):
        models.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["max_model_len", "max_requests", "max_batched_tokens"])
def test_an_encoder_needs_room_for_one_token(name: str) -> None:
    given: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigurationError, match=rf"^omni\.Encoder\({name}=0\): at least 1$"):
        encoding.load(omni.Encoder(model="/nowhere", **given))
