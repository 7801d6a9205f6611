"""The tokens of drafts that become tokens of answers: those that sampling chooses where they stand.

Each of them is sampled from its own logits with the random number of its request's seed and its place, as it is
without a draft. So an answer has the same tokens with drafts and without: a token of a draft is right with the
probability that the model gives it, and after a wrong one the sampled token takes its place. That is rejection
sampling (Leviathan et al., 2023) of a draft whose every token has probability 1, with the draws tied to the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.sampling.sampler import RowState, Sampled, sample
from stage_runtime.rules.autoregressive.steps import Row


class DraftedRow(NamedTuple):
    """A row whose draft is verified. first: where the logits after its draft's first token are. masks: which tokens its
    grammar allows after each token of the draft; None: it has none.
    """

    row: Row
    state: RowState
    draft: Sequence[int]
    first: int
    masks: Sequence[npt.NDArray[np.bool_]] | None = None


def verify(drafted: Sequence[DraftedRow], sampled: Sequence[Sampled], logits: Tensor) -> list[list[Sampled]]:
    """The new tokens of each row: those of its draft that are right, and the one sampled after them.

    sampled: what was chosen before each draft. logits: ``[draft tokens, vocabulary]`` f32, written into. An answer
    that a token ends has none after it. A token of None comes of logits that are not finite.
    """
    found = [[one] for one in sampled]
    going = list(range(len(drafted)))
    for at in range(max(len(one.draft) for one in drafted)):
        going = [index for index in going if _goes_on(drafted[index], at, found[index][-1].token)]
        if not going:
            break
        rows = [drafted[index] for index in going]
        for verified in rows:
            if verified.masks is not None:
                verified.state.mask = torch.from_numpy(~verified.masks[at])
        chosen = sample(
            logits[[one.first + at for one in rows]],
            [one.state for one in rows],
            [one.row.place + at + 1 for one in rows],
        )
        for index, one in zip(going, chosen, strict=True):
            found[index].append(one)
    return found


def _goes_on(one: DraftedRow, at: int, token: int | None) -> bool:
    """Whether the draft's token at ``at`` is the one that was chosen there, and does not end the answer."""
    if token is None or at >= len(one.draft) or token != one.draft[at]:
        return False
    return one.row.request.ends_by(token, one.row.place + at) is None
