"""The output of a step of the model. It needs no torch: the core and its clients need no more of the model than
this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Masks: TypeAlias = Mapping[str, npt.NDArray[np.bool_]]
DraftMasks: TypeAlias = Mapping[str, Sequence[npt.NDArray[np.bool_]]]
Drafted: TypeAlias = Future[Mapping[str, Sequence[int]]]  #: The drafts of a step, by request id.


class TokenLogprobs(NamedTuple):
    """The log probabilities of one generated token, before temperature and penalties."""

    logprob: float
    top: tuple[tuple[int, float], ...]  #: (token, logprob), likeliest first


class GivenRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a request that an author's stage gets beside its tokens.

    kept: by the name of `Autoregressive.keep_rows`, a row ``[hidden]`` of each new token. prompt: as that, of all
    tokens of the prompt, ``[tokens, hidden]``; with the first new token. emitted: what the decoder's `after_step` gave
    for each new token that has a next one.
    """

    kept: dict[str, tuple[Any, ...]] = {}
    prompt: dict[str, Any] = {}
    emitted: tuple[Any, ...] = ()

    def joined(self, later: GivenRows) -> GivenRows:
        names = {**self.kept, **later.kept}
        return GivenRows(
            kept={name: self.kept.get(name, ()) + later.kept.get(name, ()) for name in names},
            prompt={**self.prompt, **later.prompt},
            emitted=self.emitted + later.emitted,
        )


def joined(first: GivenRows | None, later: GivenRows | None) -> GivenRows | None:
    return later if first is None else first if later is None else first.joined(later)


class VerifiedDraft(NamedTuple):
    """A draft of ``proposed`` tokens. accepted: those before the sampled token. logprobs: theirs, if asked for."""

    proposed: int
    accepted: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


class ModelOutput(NamedTuple):
    """The output of a step, by request id. ``failed``: why. ``prompt_logprobs``: of prompts that are computed to their
    ends.

    hidden_rows: ``[hidden]``, the last hidden state from which the token was chosen. ended: requests that their decoder
    ends with this token.
    """

    sampled: dict[str, int]
    failed: dict[str, str]
    logprobs: dict[str, TokenLogprobs]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    hidden_rows: dict[str, Any] = {}
    rows: dict[str, GivenRows] = {}
    ended: dict[str, None] = {}
    drafts: dict[str, VerifiedDraft] = {}
