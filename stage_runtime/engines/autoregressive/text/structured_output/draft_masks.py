"""A draft under a grammar: the masks of the tokens that follow it, as far as the grammar allows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stage_runtime.engines.autoregressive.text.reasoning import Matcher


def along(matcher: Matcher, mask: npt.NDArray[np.bool_], draft: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """The tokens that may come after each token of a draft; none after one that the grammar refuses or ends with.

    matcher: where the draft begins; it stays there. mask: its own.
    """
    found: list[npt.NDArray[np.bool_]] = []
    if not draft or not mask[draft[0]]:
        return found
    ahead = matcher.copy()
    try:
        for token in draft:
            if not mask[token] or not ahead.take(token) or ahead.ended:
                break
            mask = ahead.mask()
            found.append(mask)
    except Exception:
        return found  # the answer may never come there; if it does, that step's mask fails
    return found
