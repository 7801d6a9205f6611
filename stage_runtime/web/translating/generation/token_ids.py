"""Token ids that stages give as notes, at the places where vLLM's answers have them. Pure."""

from __future__ import annotations

from typing import Any

from stage_runtime.wire.outputs import PROMPT_TOKEN_IDS, TOKEN_IDS
from stage_runtime.wire.values import Note


class TokenIds:
    """The token ids of all choices of one answer."""

    def __init__(self) -> None:
        self._prompts: dict[int, list[int]] = {}
        self._all: dict[int, list[int]] = {}
        self._new: dict[int, dict[str, list[int]]] = {}  #: Not given out in a chunk.

    def take(self, note: Note, first: int = 0) -> bool:
        """first: the index of the choice 0 of this note's request. Returns: False: it is a note of something else."""
        value = note.value
        if note.name not in (PROMPT_TOKEN_IDS, TOKEN_IDS) or not isinstance(value, dict):
            return False
        choice, ids = value.get("choice"), value.get("token_ids")
        if type(choice) is not int or not isinstance(ids, list):
            return False
        index = first + choice
        self._new.setdefault(index, {}).setdefault(note.name, []).extend(ids)
        if note.name == PROMPT_TOKEN_IDS:
            self._prompts[index] = ids
        else:
            self._all.setdefault(index, []).extend(ids)
        return True

    def waiting(self) -> list[int]:
        """The choices with ids for a chunk."""
        return list(self._new)

    def next(self, index: int) -> dict[str, Any]:
        """The fields of the choice's next chunk."""
        return dict(self._new.pop(index, {}))

    def whole(self, index: int) -> dict[str, Any]:
        """The fields of a choice of a whole answer."""
        prompt = {PROMPT_TOKEN_IDS: self._prompts[index]} if index in self._prompts else {}
        return {**prompt, TOKEN_IDS: self._all.get(index, [])}
