"""A copy of a tokenizer whose control tokens have names that nobody can guess. Called by `controls`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any


class Renamed:
    """Encodes text as the tokenizer does, but for control strings, which are ordinary text; `names` are tokens."""

    def __init__(self, backend: Any, added: Mapping[int, Any], controls: Collection[int]) -> None:
        """added: the tokenizer's added tokens, by id, ascending. controls: the ids of those that are renamed."""
        secret = secrets.token_hex(8)
        self.names = {number: f"\ue000{secret}{number}\ue001" for number in controls}
        self._ids: dict[int, int] = {}  #: The copy's id of an added token -> the tokenizer's.
        self._made = self._make(backend, backend.model, added)
        spelt = {str(added[number].content): number for number in controls}
        if any(number in self.encode(content) for content, number in spelt.items()):
            # The vocabulary has it as a word, as sentencepiece's have: it is renamed there, too.
            model = _model_without(backend, {content: self.names[number] for content, number in spelt.items()})
            self._made = self._make(backend, model, added)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(token, token) for token in self._made.encode(text, add_special_tokens=False).ids]

    def _make(self, backend: Any, model: Any, added: Mapping[int, Any]) -> Any:
        from tokenizers import AddedToken, Tokenizer

        made: Any = Tokenizer(model)
        made.normalizer, made.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        last = max(made.get_vocab(with_added_tokens=False).values(), default=0)
        while (size := made.get_vocab_size()) <= last:  # ids have gaps: a new one must not be that of a word
            made.add_tokens([AddedToken(f"\ue000{size}\ue001", normalized=False)])
        self._ids.clear()
        for number, token in added.items():
            name = self.names.get(number, str(token.content))
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            kept = token.normalized and (number not in self.names or _survives(backend.normalizer, name))
            made.add_tokens([AddedToken(name, normalized=kept, **flags)])
            self._ids[made.token_to_id(name)] = number
        return made


def _survives(normalizer: Any, name: str) -> bool:
    return normalizer is None or name in normalizer.normalize_str(name)


def _model_without(backend: Any, renamed: Mapping[str, str]) -> Any:
    """The model, in whose vocabulary these words have other names."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    model, state["added_tokens"], state["post_processor"] = state["model"], [], None
    words = model["vocab"]
    if isinstance(words, dict):
        model["vocab"] = {renamed.get(word, word): number for word, number in words.items()}
    else:  # Unigram's
        model["vocab"] = [[renamed.get(word, word), score] for word, score in words]
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if not _has(pair, renamed)]
    return Tokenizer.from_str(json.dumps(state)).model


def _has(pair: Any, words: Collection[str]) -> bool:
    """Whether a merge of BPE is of one of these words, or makes one."""
    parts = pair if isinstance(pair, list) else str(pair).split(" ", 1)
    return "".join(parts) in words or any(part in words for part in parts)
