"""The draft model of a stage, loaded beside its model. Called by `loader`."""

from __future__ import annotations

from typing import Any

from stage_runtime.engines.autoregressive.loading.decoders import TokensOnly
from stage_runtime.engines.autoregressive.model.models import PagedModel, UnsupportedModel, load_model, load_tokenizer
from stage_runtime.engines.autoregressive.speculation.settings import Speculation
from stage_runtime.errors import ConfigurationError


def load(settings: Speculation, target: PagedModel, tokenizer: Any) -> PagedModel:
    """A draft model in the dtype and on the device of ``target``, whose tokens it guesses.

    Raises: ConfigurationError: its tokens are others, or it keeps state beside attention.
    """
    name = f"omni.Autoregressive(speculative_config=…): the draft model {settings.model}"
    if isinstance(tokenizer, TokensOnly):
        raise ConfigurationError(f"{name}: the stage's decoder has tokens that are not text")
    check_vocabulary(name, load_tokenizer(settings.model, revision=settings.revision), tokenizer)
    dtype = str(target.dtype).removeprefix("torch.")
    model = load_model(settings.model, dtype=dtype, revision=settings.revision, device=str(target.device))
    draft = PagedModel(model)
    if draft.state_layers:
        kind = draft.model.config.model_type
        raise UnsupportedModel(f"{name}: a {kind} model keeps state beside attention, which wrong guesses would change")
    return draft


def check_vocabulary(name: str, draft: Any, target: Any) -> None:
    """Raises: ConfigurationError: a token of one of both tokenizers is another one in the other."""
    own, wanted = draft.get_vocab(), target.get_vocab()
    if own == wanted:
        return
    differing = min((token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token)), key=str)
    raise ConfigurationError(
        f"{name}: its vocabulary of {len(own)} tokens is not the stage's of {len(wanted)}: the token {differing!r} is "
        f"{own.get(differing)} there and {wanted.get(differing)} here"
    )
