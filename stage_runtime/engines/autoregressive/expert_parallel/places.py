"""The place of an engine among those that share experts. It imports no torch: each engine process reads it.

Not here: what they tell each other (`meetings`).
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """An engine's place among those that share experts. rendezvous: a file by which they meet."""

    rank: int
    size: int
    rendezvous: str
