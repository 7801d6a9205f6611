"""State that a model keeps beside attention: of short convolutions, linear attention and Mamba layers.

Such a layer's state after a token depends on all tokens before it, so it is kept by request, and a request's tokens
are computed in order. transformers' layers read and write it by the methods of its `Cache`; here each row of a flat
batch gets a cache of its own. Rows that decode are one call. Called by `models` and `model_runner`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

CACHES: Final = ("cache_params", "past_key_values")  # by which transformers' layers take their cache
LayerState: TypeAlias = dict[tuple[str, int], Tensor]  #: ``[rows, …]`` by kind and number.
States: TypeAlias = Mapping[int, LayerState]  #: States by layer.


class StateLayer(NamedTuple):
    """A module that keeps state. cache: the name of its argument. continues: it goes on from a state with several
    tokens at once, else with one after the other.
    """

    module: Any
    layer: int
    cache: str
    forward: Callable[..., Any]
    continues: bool


class LayerCache:
    """`Cache` of transformers, as far as one layer with state asks it. Its tensors are changed in place."""

    def __init__(self, state: LayerState) -> None:
        self.state = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Returns: what the convolution reads: the inputs kept so far, or zeros, and the new ones."""
        before = self.state.get(("conv", state_idx))
        width = conv_kernel_size or conv_states.shape[-1]
        if before is None:
            whole = functional.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        else:
            whole = torch.cat([before, conv_states], -1)
        self.state["conv", state_idx] = whole[..., -width:].clone()
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.state["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.state)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class StatePass:
    """The states of a pass's rows, before and after it."""

    def __init__(self, starts: Sequence[int], before: Sequence[States], device: torch.device) -> None:
        """starts: first token of each row, and the end."""
        self.after: list[dict[int, LayerState]] = [{} for _row in before]
        self._before = before
        self._tokens = starts[-1]
        counts = [end - start for start, end in itertools.pairwise(starts)]
        decode = [row for row, states in enumerate(before) if states and counts[row] == 1]
        self._calls = [([row], slice(starts[row], starts[row + 1])) for row in range(len(before)) if row not in decode]
        self._decode = decode
        self._places = torch.tensor([starts[row] for row in decode], device=device)

    def run(self, one: StateLayer, hidden: Tensor, options: Mapping[str, Any]) -> Any:
        """A layer over ``[1, tokens, hidden]``, each row from its state on."""
        found: Tensor | None = None
        for rows, tokens in self._calls:
            given = self._call(
                one, rows, hidden[:, tokens], {k: _cut(v, tokens, self._tokens) for k, v in options.items()}
            )
            found = hidden.new_empty(1, self._tokens, given.shape[-1], dtype=given.dtype) if found is None else found
            found[:, tokens] = given
        if self._decode:
            picked = {k: self._pick(v) for k, v in options.items()}
            given = self._call(one, self._decode, self._pick(hidden), picked)
            found = hidden.new_empty(1, self._tokens, given.shape[-1], dtype=given.dtype) if found is None else found
            found[0, self._places] = given[:, 0]
        return found

    def _call(self, one: StateLayer, rows: Sequence[int], hidden: Tensor, options: Mapping[str, Any]) -> Tensor:
        states = [self._before[row].get(one.layer, {}) for row in rows]
        cache = LayerCache({key: torch.cat([state[key] for state in states]) for key in states[0]})
        if cache.state and not one.continues:
            parts = [self._part(one, cache, hidden, options, at) for at in range(hidden.shape[1])]
            output = torch.cat(parts, 1)
        else:
            output = _first(one.forward(hidden, **{**options, one.cache: cache}))
        for at, row in enumerate(rows):
            self.after[row][one.layer] = {key: value[at : at + 1] for key, value in cache.state.items()}
        return output

    def _part(self, one: StateLayer, cache: LayerCache, hidden: Tensor, options: Mapping[str, Any], at: int) -> Tensor:
        """One token of what ``_call`` is given."""
        token, count = slice(at, at + 1), hidden.shape[1]
        cut = {name: _cut(value, token, count) for name, value in options.items()}
        return _first(one.forward(hidden[:, token], **{**cut, one.cache: cache}))

    def _pick(self, value: Any) -> Any:
        """The part of the rows that decode, ``[rows, 1, …]``."""
        if isinstance(value, tuple):
            return tuple(self._pick(one) for one in value)
        return value[0, self._places][:, None] if _by_token(value, self._tokens) else value


STATES_KEPT: Final = 2  # of each request


class StateSlots:
    """The states of requests. A step that is computed again begins from the one before, so two are kept of each."""

    def __init__(self) -> None:
        self._slots: dict[str, list[tuple[int, States]]] = {}  #: Tokens so far, and the states after them.
        self._latest: set[str] = set()  #: Requests of the last pass, whose rows share tensors.

    def begin(self, names: Sequence[str], starts: Sequence[int], computed: Sequence[int], device: Any) -> StatePass:
        """names: of the rows' requests; none: a pass over padding, whose states nobody needs.

        Raises: RuntimeError: a row does not begin where its state is.
        """
        before = [self._before(name, at) for name, at in zip(names, computed, strict=True)] if names else []
        return StatePass(starts, before or [{} for _row in computed], torch.device(device))

    def _before(self, name: str, computed: int) -> States:
        if computed == 0:
            return {}
        for tokens, states in self._slots.get(name, ()):
            if tokens == computed:
                return states
        raise RuntimeError(f"the state of request {name} after {computed} tokens is not kept")

    def keep(self, names: Sequence[str], lengths: Sequence[int], step: StatePass) -> None:
        """The pass has been computed. lengths: tokens of each row, those of the pass included.

        A request that is not in it gets tensors of its own: each of an earlier pass would be kept whole for it.
        """
        for name in self._latest.difference(names):
            self._slots[name] = [(tokens, _own(states)) for tokens, states in self._slots.get(name, ())]
        self._latest = set(names)
        for name, length, states in zip(names, lengths, step.after, strict=True) if names else ():
            older = [one for one in self._slots.get(name, ()) if one[0] < length][-1:]
            self._slots[name] = [*older, (length, states)]

    def drop(self, name: str) -> None:
        self._slots.pop(name, None)
        self._latest.discard(name)

    @property
    def count(self) -> int:
        return len(self._slots)


def _own(states: States) -> States:
    return {layer: {key: _alone(value) for key, value in one.items()} for layer, one in states.items()}


def _alone(value: Tensor) -> Tensor:
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _first(given: Any) -> Tensor:
    output: Tensor = given[0] if isinstance(given, tuple) else given
    return output


def _cut(value: Any, tokens: slice, count: int) -> Any:
    """The part of what is given for each of ``count`` tokens."""
    if isinstance(value, tuple):
        return tuple(_cut(one, tokens, count) for one in value)
    return value[:, tokens] if _by_token(value, count) else value


def _by_token(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == count


def layers_of(model: Any) -> list[StateLayer]:
    """The modules of ``model`` that keep state."""
    found = []
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        forward = inspect.unwrap(type(module).forward)
        cache = next((name for name in CACHES if name in inspect.signature(forward).parameters), None)
        if layer is None or cache is None or not _keeps(forward):
            continue
        found.append(StateLayer(module, int(layer), cache, type(module).forward.__get__(module), _continues(forward)))
    return found


def _keeps(forward: Callable[..., Any]) -> bool:
    """Whether it calls the cache's methods of states, by its code."""
    return not {"update_conv_state", "update_recurrent_state"}.isdisjoint(forward.__code__.co_names)


def _continues(forward: Callable[..., Any]) -> bool:
    """Whether it begins its recurrence from a state, by the names of the arguments that it passes on.

    The layers of Mamba 1 begin several tokens from zeros, whatever state there is.
    """
    code = forward.__code__
    if "update_recurrent_state" not in code.co_names:
        return True
    passed = {name for one in code.co_consts if isinstance(one, tuple) for name in one}
    return not passed.isdisjoint({"initial_state", "initial_states"})
