"""Whole answers from tokens to text, by a model's tokenizer; `detokenizer` does it piece by piece with this."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def decoder(tokenizer: Any, kept: str = "") -> Callable[[Sequence[int]], str]:
    """Tokens to text, special tokens left out. kept: the text of one that is not."""

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    place = tokenizer.get_added_vocab().get(kept) if kept else None
    if place is None:
        return decode

    def keep(tokens: Sequence[int]) -> str:
        parts = [list(part) for _found, part in itertools.groupby(tokens, lambda one: one == place)]
        return "".join(kept * len(part) if part[0] == place else decode(part) for part in parts)

    return keep
