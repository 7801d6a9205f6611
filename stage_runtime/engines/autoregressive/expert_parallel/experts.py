"""Mixtures of experts of which this engine keeps a share of the experts, and a runner whose passes all engines compute.

A mixture is a module that transformers calls with rows, the numbers of their experts and the weights of these, and
that holds the weights of all experts in parameters ``[experts, …]``, as the model's plan for expert parallelism says.
Router, shared experts, attention and all else are whole in every engine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from stage_runtime.engines.autoregressive.expert_parallel.meetings import ExpertRanks
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import Computed, UnsupportedModel
from stage_runtime.engines.autoregressive.model.rows.input_batch import Pass
from stage_runtime.errors import describe

log = logging.getLogger(__name__)

BY_EXPERT: Final = "grouped_gemm"  #: transformers' name of a parameter whose first dimension are the experts.


class ExpertsShare(nn.Module):
    """The experts ``first .. first + count`` of a mixture."""

    def __init__(self, experts: nn.Module, layer: int, first: int, count: int, ranks: ExpertRanks) -> None:
        super().__init__()
        self.share = experts
        self._layer, self._first, self._count = layer, first, count
        self._ranks = ranks
        self._none: tuple[Tensor, ...] = ()  #: No rows, in the form of those that the model gives.

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden: ``[rows, hidden]``. index, weights: of each row's experts, ``[rows, k]``."""
        if not self._ranks.joined:
            self._none = tuple(one[:0].detach().clone() for one in (hidden, index, weights))
            return self._own(hidden, index, weights)
        return self._together(hidden, index, weights)

    def take_part(self) -> None:
        """Compute for the rows of others. This happens in each pass in which this engine's model does not come here."""
        hidden, index, weights = self._none
        rows = self._ranks.rows[self._ranks.rank]  # of a pass that has failed: they get no expert
        none = index.new_full((rows, index.shape[1]), -1)
        self._together(hidden.new_zeros(rows, hidden.shape[1]), none, weights.new_zeros(none.shape))

    def _together(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self._ranks.enter(self._layer, len(hidden))
        try:
            part = self._own(*self._ranks.gather_rows((hidden, index, weights)))
            return self._ranks.give_back(part)
        except Exception as error:  # the others wait for this part
            raise self._ranks.failed(f"its experts failed: {describe(error)}") from error

    def _own(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The part of the rows' outputs that comes of our experts: each pair of row and expert as a row of its own."""
        rows, places = torch.where((index >= self._first) & (index < self._first + self._count))
        found = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if len(rows):
            given = index[rows, places] - self._first
            outputs = self.share(hidden[rows], given[:, None], weights[rows, places][:, None])
            found.index_add_(0, rows, outputs.float())
        return found.to(hidden.dtype)


class ExpertRunner(ModelRunner):
    """Each pass is computed together with the other engines."""

    ranks: ExpertRanks  #: Set before the first pass.

    def _compute(self, batch: Pass, plan: Any) -> Computed:
        if not self.ranks.joined:
            return super()._compute(batch, plan)
        with self.ranks.pass_of(len(batch.ids)):
            return super()._compute(batch, plan)

    def close(self) -> None:
        self.ranks.close()


def share(model: Any, ranks: ExpertRanks) -> None:
    """Keep this engine's experts of each mixture. Changes ``model``; what `reading_own` has read is kept as it is.

    Raises: UnsupportedModel: it has no mixture of a form that we know, or one that cannot be shared.
    """
    name = type(model).__name__
    mixtures: dict[str, list[str]] = {}
    for path in _by_expert(model):
        mixture, _, parameter = path.rpartition(".")
        mixtures.setdefault(mixture, []).append(parameter)
    if not mixtures:
        raise UnsupportedModel(f"{name} has no experts that enable_expert_parallel could spread over engines")
    if all(type(one) is nn.Parameter for one in model.parameters()):
        log.warning("%s was read whole, with the experts of other engines, which are dropped now", name)
    for layer, (path, parameters) in enumerate(mixtures.items()):
        experts: Any = model.get_submodule(path)
        if {one for one, _ in experts.named_parameters()} != set(parameters):
            raise UnsupportedModel(f"{name}: {path} has weights beside those of single experts")
        total = len(getattr(experts, parameters[0]))
        if total % ranks.size:
            raise UnsupportedModel(f"{name}: {total} experts cannot be shared by {ranks.size} engines")
        count = total // ranks.size
        first = count * ranks.rank
        for one in parameters:
            experts.register_parameter(one, _kept(getattr(experts, one), first, count))
        experts.num_experts = count
        made = ExpertsShare(experts, layer, first, count, ranks)
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
        ranks.layers.append(made.take_part)


def _kept(values: Tensor, first: int, count: int) -> nn.Parameter:
    from torch.distributed.tensor import DTensor

    own = values.to_local() if isinstance(values, DTensor) else values.detach()[first : first + count].clone()
    return nn.Parameter(own, requires_grad=False)


def _by_expert(model: Any) -> Iterator[str]:
    """The paths of the parameters whose first dimension are experts, by the plan of the model's class."""
    plan = getattr(model, "ep_plan", None) or {}
    for path, _ in model.named_parameters():
        if plan.get(re.sub(r"\.\d+(?=\.)", ".*", path)) == BY_EXPERT:
            yield path


def reading_own(config: Any, ranks: ExpertRanks) -> Any | None:
    """A class of transformers for ``config`` whose ``from_pretrained`` reads this engine's experts alone.

    None: it does not exist; a whole model has to be read. Its parameters are those of torch's distributed tensors,
    of which transformers reads the local part; `share` makes plain ones of them.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers.models.auto import modeling_auto

    mapping: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    whole = mapping[type(config)] if type(config) in mapping else None
    if whole is None or whole.config_class is not type(config):
        return None
    mesh = DeviceMesh("cpu", list(range(ranks.size)))

    class Own(whole):  # type: ignore[misc,valid-type]  # a class of the installed transformers
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for path in list(_by_expert(self)):
                parent, _, name = path.rpartition(".")
                experts = self.get_submodule(parent)
                spread = distribute_tensor(getattr(experts, name), mesh, [Shard(0)], src_data_rank=None)
                experts.register_parameter(name, nn.Parameter(spread, requires_grad=False))

    Own.__name__, Own.__module__ = whole.__name__, whole.__module__
    return Own
