"""The engines of one instance that share the experts of a model: the group, what they tell each other before each pass,
and the rows that cross in it.

Not here: when an engine steps (`data_parallel.dp_engine`), which rows cross and why (`experts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from stage_runtime.engines.autoregressive.expert_parallel.places import Place
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import RankLost, Ranks
from stage_runtime.errors import describe

PASS_S: Final = 300.0  # longer than any pass: a rank that has died is noticed at once, a frozen one by the client


class ExpertRanks(Ranks):
    """This engine among those that share experts. `core.serving.Lockstep`."""

    def __init__(self, place: Place, *, timeout_s: float = PASS_S) -> None:
        """Blocks until all engines are there."""
        super().__init__(place.rank, place.size, init_method=f"file://{place.rendezvous}", sum_timeout_s=timeout_s)
        self.joined = False  #: Passes are computed by all; before, each engine computes with its own experts alone.
        #: One function of each mixture, in order: takes part in it without rows.
        self.layers: list[Callable[[], None]] = []
        self.meetings = 0
        self.leaving = False
        self.over = self.some_leave = self.all_leave = False  #: The result of the last meeting.
        self.rows: list[int] = []  #: Rows of each rank in the pass under way.
        self._next = 0  #: The mixture that the pass under way comes to next.
        self._lost = False

    def begin(self) -> None:
        """All passes after this call are computed together. Called once, when the model is loaded and warmed up."""
        self.joined = True

    def take_part(self, *, unfinished: bool) -> None:
        """`Lockstep.take_part`."""
        self._meet(0, unfinished=unfinished)
        if any(self.rows):
            with torch.inference_mode():
                self._finish()

    @contextlib.contextmanager
    def pass_of(self, rows: int) -> Iterator[None]:
        """A pass in which this engine has so many rows. The others wait in each mixture for each other: when it fails
        here alone, this engine takes part in the rest of it without rows.
        """
        self._meet(rows, unfinished=True)
        try:
            yield
        except Exception:
            self._finish()
            raise
        if self._next != len(self.layers):
            raise self.failed(f"a pass has {len(self.layers)} mixtures of experts, and {self._next} were computed")

    def enter(self, layer: int, rows: int) -> None:
        """The pass has come to a mixture. Raises: RankLost: the others are not in the same one."""
        if layer != self._next or rows != self.rows[self.rank]:
            known = f"mixture {self._next} with {self.rows[self.rank]} rows"
            raise self.failed(f"the model computes mixture {layer} with {rows} rows instead of {known}")
        self._next += 1

    def gather_rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The rows of all ranks, one rank's after another's. parts: of one number of rows, each ``[rows, …]``.

        Raises: RankLost.
        """
        most, own = max(self.rows), self.rows[self.rank]
        flat = [part.contiguous().view(torch.uint8) for part in parts]
        packed = torch.zeros(most, sum(one.shape[1] for one in flat), dtype=torch.uint8)
        if own:
            torch.cat(flat, 1, out=packed[:own])
        found = [torch.empty_like(packed) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(found, packed, group=self._sums))
        whole = torch.cat([one[:rows] for one, rows in zip(found, self.rows, strict=True)])
        made, at = [], 0
        for part, one in zip(parts, flat, strict=True):
            made.append(whole[:, at : at + one.shape[1]].contiguous().view(part.dtype))
            at += one.shape[1]
        return made

    def give_back(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts of this rank's rows. part: of the rows of all ranks, ``[rows, hidden]``.

        Raises: RankLost.
        """
        own = self.rows[self.rank]
        found = part.new_empty(self.size * own, part.shape[1])
        sizes = [own] * self.size
        self._collective(lambda: dist.all_to_all_single(found, part, sizes, self.rows, group=self._sums))
        return found.view(self.size, own, part.shape[1]).sum(0)

    def close(self) -> None:
        """The others may be gone, or still read the last meeting: nothing of theirs is waited for after it."""
        if not self._lost:
            with contextlib.suppress(RankLost):
                self._exchange([0])
            super().close()

    def _meet(self, rows: int, *, unfinished: bool) -> None:
        found = self._exchange([rows, int(unfinished), int(self.leaving)])
        self.meetings += 1
        self._next = 0
        self.rows = [one[0] for one in found]
        self.over = not any(one[1] for one in found)
        self.some_leave, self.all_leave = any(one[2] for one in found), all(one[2] for one in found)

    def _exchange(self, values: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(values)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(found, own, group=self._sums))
        return [one.tolist() for one in found]

    def _finish(self) -> None:
        for layer in self.layers[self._next :]:
            layer()

    def _collective(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise self.failed(f"another engine has ended, or is frozen: {describe(error)}") from error

    def failed(self, why: str) -> RankLost:
        """The error by which this engine ends: the others can no longer count on it."""
        self._lost = True
        return RankLost(f"expert-parallel rank {self.rank} of {self.size}: {why}")
