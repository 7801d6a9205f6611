"""Whole answers from tokens to text, by a model's tokenizer; `detokenizer` does it piece by piece with this."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def decoder(tokenizer: Any, kept: Sequence[str] = ()) -> Callable[[Sequence[int]], str]:
    """Tokens to text, special tokens left out. kept: the texts of some that are not."""

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    known = tokenizer.get_added_vocab() if any(kept) else {}
    texts = {known[text]: text for text in kept if text in known}
    if not texts:
        return decode

    def keep(tokens: Sequence[int]) -> str:
        parts = [(one, list(part)) for one, part in itertools.groupby(tokens, texts.get)]
        return "".join(decode(part) if one is None else one * len(part) for one, part in parts)

    return keep
