"""Facts for a question, out of a text file with one fact a line. Called by the stage `retrieve`.

The file is read again when it changes, so that who edits it need restart nothing; lines already known are not
embedded a second time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stage_models.voice.conversation import Fact

Vectors = npt.NDArray[np.float32]
log = logging.getLogger(__name__)

#: Texts to unit vectors, ``[len(texts), width]``.
Embed = Callable[[Sequence[str]], Vectors]


class FactBook:
    """The lines of a file, found by meaning. Blank lines and those that begin with ``#`` are not facts."""

    def __init__(self, path: Path, embed: Embed) -> None:
        self._path = path
        self._embed = embed
        self._turn = threading.Lock()
        self._problem = ""  #: Why the file could not be read at the last look.
        #: (mtime_ns, size) of the file as last read; None: never.
        self._version: tuple[int, int] | None = None
        self._facts: list[str] = []
        #: Row i is the vector of ``_facts[i]``.
        self._vectors: Vectors = np.zeros((0, 0), np.float32)
        self.refresh()

    def __len__(self) -> int:
        return len(self._facts)

    def refresh(self) -> None:
        """Read the file if it is not what was read last.

        Raises: OSError, UnicodeDecodeError: the file cannot be read.
        """
        with self._turn:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if version == self._version:
                return
            facts = read_facts(self._path.read_text(encoding="utf-8"))
            known = dict(zip(self._facts, self._vectors, strict=True))
            new = [fact for fact in facts if fact not in known]
            known.update(zip(new, self._embed(new), strict=True) if new else ())
            self._facts, self._version = facts, version
            self._vectors = np.stack([known[fact] for fact in facts]) if facts else np.zeros((0, 0), np.float32)

    def find(self, question: str, *, limit: int, min_score: float) -> list[Fact]:
        """Up to ``limit`` facts that are at least ``min_score`` close, best first.

        They are those of before while the file cannot be read: an editor may have moved it away for a moment.
        """
        try:
            self.refresh()
        except (OSError, UnicodeDecodeError) as error:
            if str(error) != self._problem:
                log.warning("%s cannot be read, the facts of before stay: %s", self._path, error)
            self._problem = str(error)
        else:
            self._problem = ""
        facts, vectors = self._facts, self._vectors
        if not facts or not question:
            return []
        scores = vectors @ self._embed([question])[0]
        best = np.argsort(-scores, kind="stable")[:limit]
        return [Fact(text=facts[i], score=round(float(scores[i]), 4)) for i in best if scores[i] >= min_score]


def read_facts(text: str) -> list[str]:
    """The facts in a file's text, in order, each once."""
    lines = (line.strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


class Embedder:
    """all-MiniLM-L6-v2: mean of the last layer over a text's tokens, scaled to length 1."""

    MAX_TOKENS = 256  # what the model was trained on; the rest of a longer text is not looked at
    BATCH = 32

    def __init__(self, model: Path, *, threads: int) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(str(model), local_files_only=True, dtype=torch.float32)
        self._model.eval()

    def __call__(self, texts: Sequence[str]) -> Vectors:
        batches = [texts[at : at + self.BATCH] for at in range(0, len(texts), self.BATCH)]
        return np.concatenate([self._embed(batch) for batch in batches])

    def _embed(self, texts: Sequence[str]) -> Vectors:
        import torch

        batch = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.MAX_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            vectors: Vectors = torch.nn.functional.normalize(mean, dim=1).numpy()
        return vectors
