"""The author's `Decoder` of a stage, made where its model is computed; and the tokenizer of its tokens."""

from __future__ import annotations

from typing import Any, cast

from stage_runtime.api import Autoregressive, Decoder
from stage_runtime.engines.autoregressive.model.models import load_tokenizer
from stage_runtime.engines.making import resolving
from stage_runtime.errors import ConfigurationError, InvalidRequest, describe


def made(path: str) -> Decoder:
    """A decoder of the class that ``path`` names. Raises: ConfigurationError: it does not exist, or cannot be made."""
    kind = resolving.resolve(path, field="omni.Autoregressive(decoder)")
    try:
        found: Any = kind()
    except Exception as error:
        raise ConfigurationError(f"omni.Autoregressive(decoder={path!r}): {describe(error)}") from error
    if not callable(getattr(found, "load", None)):
        raise ConfigurationError(f"omni.Autoregressive(decoder={path!r}): expected an omni.Decoder, with a method load")
    return cast(Decoder, found)


def tokenizer_of(spec: Autoregressive) -> Any:
    """The model's tokenizer; `TokensOnly` where its decoder says that its tokens are not text (``text = False``)."""
    if spec.decoder is not None:
        kind = resolving.resolve(spec.decoder, field="omni.Autoregressive(decoder)")
        if not getattr(kind, "text", True):
            return TokensOnly()
    return load_tokenizer(spec.model, revision=spec.revision)


class TokensOnly:
    """A tokenizer's stand-in for tokens that are not text: codes of sound, for example."""

    chat_template = None
    eos_token_id = None

    def __call__(self, _text: str) -> dict[str, list[int]]:
        raise InvalidRequest("this stage continues token ids and rows, not text: its tokens are not text")

    def decode(self, _tokens: Any, **_options: Any) -> str:
        return ""

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)
