"""Prompt lookup: what followed the last tokens of a request where they stood before is a draft of its next ones. Pure.

Source: vLLM's ``NgramProposer``: of the longest sequence that has stood before, its first place counts.
"""

from __future__ import annotations

from collections.abc import Iterable


class PromptLookup:
    """The tokens of one request, and where each short sequence of them stood first."""

    def __init__(self, longest: int, shortest: int) -> None:
        """Tokens of the sequences that are looked for: from ``longest`` down to ``shortest``."""
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        #: Each sequence that ends before the last token, and the place behind it. Sequences of all sizes.
        self._after: dict[tuple[int, ...], int] = {}

    def add(self, tokens: Iterable[int]) -> None:
        known = self._tokens
        for token in tokens:
            end = len(known)
            for size in self._sizes:
                if size <= end:
                    self._after.setdefault(tuple(known[end - size :]), end)
            known.append(token)

    def draft(self, most: int) -> list[int]:
        """Tokens that may come next, ``most`` at most; empty: the last ones occur nowhere before. Rows of embeddings
        (negative) end a draft.
        """
        known = self._tokens
        for size in self._sizes:
            after = self._after.get(tuple(known[-size:])) if size <= len(known) else None
            if after is not None:
                found = known[after : after + most]
                return found[: next((at for at, token in enumerate(found) if token < 0), None)]
        return []
