"""A decoder of transformers whose attention reads and writes our paged cache. Loading, and one pass over a flat batch.

transformers is an optional dependency (extra ``engine``): it is imported here, when a model is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stage_runtime import imports
from stage_runtime.api import NextRows, Step
from stage_runtime.engines.autoregressive.model import adapted, checkpoints, positions, refusals, states
from stage_runtime.engines.autoregressive.model.adapted import AdapterLayers, AdapterTokens
from stage_runtime.engines.autoregressive.model.paged_attention.attention import (
    AttentionBackend,
    LayerCall,
    LayerShape,
    output_of,
)
from stage_runtime.engines.autoregressive.model.refusals import UnsupportedModel as UnsupportedModel
from stage_runtime.errors import ConfigurationError, describe

ATTENTION: Final = "omnipipeline_paged"  #: Our attention's name in transformers' registry.
_IGNORED: Final = frozenset({"attention_mask", "dropout", "is_causal", "use_cache", "position_ids", "cache_position"})


class FlatBatch(NamedTuple):
    """A step on the model's device, one request's tokens after the other's.

    ids: ``[T]``. positions: ``[T]``, or ``[3, T]`` for a model of three axes. rows: tokens whose logits are wanted.
    embeddings: places, and ``[places, hidden]`` instead of their ids. added: layer, places, and ``[places, hidden]``
    that are added to its output there. hidden: what the head of the vocabulary takes is wanted, too. keep: layers
    whose output is wanted, before anything is added to it. adapters: tokens by their adapter.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    embeddings: tuple[Tensor, Tensor] | None = None
    added: Sequence[tuple[int, Tensor, Tensor]] = ()
    hidden: bool = False
    keep: Sequence[int] = ()
    adapters: AdapterTokens = ()


class Computed(NamedTuple):
    """logits: ``[rows, vocabulary]`` f32. hidden: ``[rows, hidden]``. kept: by layer ``[T, hidden]``."""

    logits: Tensor
    hidden: Tensor | None = None
    kept: Mapping[int, Tensor] = {}


class _Pass(threading.local):
    """The pass that this thread is in. Not arguments of the model: each architecture passes on other ones."""

    backend: AttentionBackend | None = None
    plan: Any = None
    probe: dict[int, LayerShape] | None = None
    sinks: bool = False  #: A layer that was probed has them.
    states: states.StatePass | None = None
    within: bool = False  #: A layer with state, called for some of the rows.
    batch: FlatBatch | None = None


_pass = _Pass()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' layers call. ``[1, heads, tokens, D]`` in, ``[1, tokens, heads, D]`` out."""
    layer = int(module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _pass.probe is not None:
        _refuse(module, others)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    if len(k) != len(q):
        raise UnsupportedModel(f"{type(module).__name__} reads keys that are not of the step's tokens")
    return attend(LayerCall(layer, q, k, v, scale, sliding_window, softcap, s_aux))[None], None


def current() -> tuple[AttentionBackend | None, Any]:
    """The backend of the pass that this thread is in, and its plan."""
    return _pass.backend, _pass.plan


def hooked() -> bool:
    """Whether outputs of single layers are kept or added to in the pass that this thread is in."""
    return _pass.batch is not None and bool(_pass.batch.keep or _pass.batch.added)


def attend(call: LayerCall) -> Tensor:
    """`AttentionBackend.forward` of the pass that this thread is in."""
    if _pass.within:
        raise UnsupportedModel(f"layer {call.layer} attends within a layer that keeps state of its own")
    if _pass.probe is not None:
        if call.layer in _pass.probe:
            raise UnsupportedModel(f"layer {call.layer} attends twice in a pass")
        _pass.sinks |= call.sinks is not None
        _pass.probe[call.layer] = LayerShape(call.k.shape[1], call.k.shape[-1], call.v.shape[-1])
        return output_of(call).zero_()
    assert _pass.backend is not None, "the model was called outside of a pass"
    return _pass.backend.forward(call, _pass.plan)


def _refuse(module: Any, others: dict[str, Any]) -> None:
    """Refuse what our attention does not compute, rather than compute something else."""
    unknown = [name for name in ("position_bias", "head_mask", "sinks") if others.get(name) is not None]
    if unknown:
        raise UnsupportedModel(f"{type(module).__name__} uses {', '.join(unknown)}, which the engine does not compute")
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{type(module).__name__} is not causal: its attention reads later tokens")


def _import_models(package: Any) -> None:
    """Import `transformers.models` with the names that `transformers` has just read from the files of all models.

    It would read the files again, by another path: 0.35 s of processor time with 5.23.
    """
    utils, folder = package.utils.import_utils, Path(package.__file__).parent / "models"
    read: Any = getattr(utils, "create_import_structure_from_path", None)
    if not hasattr(read, "cache_info"):  # another version, without the cache that makes this cheap
        return
    own_path = str(folder / "__init__.py")
    utils.create_import_structure_from_path = lambda path: read(folder if path == own_path else path)
    try:
        importlib.import_module("transformers.models")
    finally:
        utils.create_import_structure_from_path = read


def transformers() -> Any:
    """The package, with our attention registered in it.

    Raises: ConfigurationError: it is not installed.
    """
    try:
        with imports.uncollected():
            import transformers as package

            _import_models(package)
            from transformers.masking_utils import AttentionMaskInterface

            interface = package.AttentionInterface  # which imports what models have in common
    except ImportError as error:
        raise ConfigurationError(
            f"omni.Autoregressive needs transformers, which cannot be imported ({error}): "
            "pip install 'omnipipeline[engine]'"
        ) from error
    interface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_args, **_kwargs: None)
    return package


def load_model(
    model: str,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    device: str = "cpu",
    kind: Callable[[Any], Any | None] | None = None,
) -> Any:
    """A causal language model of a folder, a GGUF file, or a name at the model hub; in evaluation mode.

    kind: a class to load in the place of transformers' own, by the model's config; not of a GGUF file.

    Raises: UnsupportedModel: its attention cannot be replaced.
    """
    package = transformers()
    where, options = _where(model, revision)
    auto = package.AutoModelForCausalLM
    if "gguf_file" not in options:
        config = package.AutoConfig.from_pretrained(where, **options)
        refusals.check_config(model, config)
        auto = (kind and kind(config)) or auto
    try:
        loaded = auto.from_pretrained(where, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, **options)
    except ValueError as error:
        if "attention" in str(error).lower():
            raise UnsupportedModel(f"{model}: {error}") from error
        raise
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise UnsupportedModel(f"{model}: its class of transformers has attention that cannot be replaced") from error
    return loaded.eval().to(device)


def load_plain(model: str, *, revision: str | None = None) -> Any:
    """A model as transformers has it, to read its weights."""
    where, options = _where(model, revision)
    if "gguf_file" not in options:
        refusals.check_config(model, transformers().AutoConfig.from_pretrained(where, **options))
    return transformers().AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)


def load_configs(model: str, *, revision: str | None = None) -> tuple[Any, Any]:
    """The model's config and its generation config; None where it has no such file."""
    package = transformers()
    where, options = _where(model, revision)
    config = package.AutoConfig.from_pretrained(where, **options)
    if "gguf_file" in options:
        return config, None
    try:
        return config, package.GenerationConfig.from_pretrained(where, **options)
    except OSError:
        return config, None


def load_tokenizer(model: str, *, revision: str | None = None, **given: Any) -> Any:
    """given: further options of transformers. Raises: ConfigurationError: the folder has no tokenizer."""
    where, options = _where(model, revision)
    try:
        return transformers().AutoTokenizer.from_pretrained(where, **options, **given)
    except (OSError, ValueError) as error:
        if not Path(where).is_dir() or "gguf_file" in options or Path(where, "tokenizer.json").exists():
            raise
        raise ConfigurationError(
            f"model {model!r}: this folder has no tokenizer.json, and no other tokenizer that can be read"
        ) from error


def _where(model: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    if (path := checkpoints.local(model)) is None:
        return model, {"revision": revision} if revision else {}
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    return str(path), {"local_files_only": True}


class PagedModel:
    """A causal language model of transformers, called with a flat batch."""

    def __init__(self, model: Any, after_step: Callable[[Step], NextRows] | None = None) -> None:
        """after_step: of the model's `Decoder`; None: each token's input is its embedding.

        Raises: UnsupportedModel: it does not attend once a layer through transformers' interface.
        """
        self.after_step = after_step
        if not hasattr(model.config, "_attn_implementation"):
            raise UnsupportedModel(f"{type(model).__name__} is not a model of transformers")
        transformers()
        refusals.check_config(type(model).__name__, model.config)
        model.set_attn_implementation(ATTENTION)
        self.model = model.eval()
        text = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self.positions = positions.positions_of(text)
        self.end_ids = end_ids_of(getattr(model, "generation_config", None), model.config)
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        accepted = inspect.signature(model.forward).parameters
        self._keeps_rows = "logits_to_keep" in accepted
        #: Floats of a row that takes the place of a token id; None: the model takes ids only.
        self.row_size: int | None = getattr(model.get_input_embeddings(), "embedding_dim", None)
        if "inputs_embeds" not in accepted:
            self.row_size = None
        #: `decoder_pass.DecoderPass.run`, where the model has one: what it does not compute, transformers' class does.
        self.shorter: Callable[[FlatBatch], Tensor | None] = lambda batch: None
        #: Axes of a token's position: 3 where rotary embedding turns by time, height and width.
        self.axes = positions.axes_of(text)
        #: Its layers in order, where rows can be taken and added; empty: it has none that we know.
        self.decoder_layers = _decoder_layers(model, int(text.num_hidden_layers))
        #: Its modules that keep state beside attention: a request's tokens are computed in order, none are shared.
        self.state_layers = states.layers_of(model)
        for one in self.state_layers:
            one.module.forward = _by_row(one)
        self.adapters: AdapterLayers | None = None  #: Computes adapters, of a stage that takes them.
        self.state_bytes = 0  #: Bytes that ``state_layers`` keep after a token of one request.
        self.layers = self._probe(text)
        self.sinks = _pass.sinks  #: Whether a layer's softmax has one more logit.

    def _probe(self, text: Any) -> dict[int, LayerShape]:
        """The shapes that each layer caches, found by one pass over one token."""
        found: dict[int, LayerShape] = {}
        _pass.probe, _pass.sinks = found, False
        if self.state_layers:
            _pass.states = states.StatePass([0, 1], [{}], self.device)
        try:
            zero = torch.zeros(1, dtype=torch.long, device=self.device)
            self._call(FlatBatch(zero, zero if self.axes == 1 else zero.expand(self.axes, 1), zero))
        except (UnsupportedModel, RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            kind = self.model.config.model_type
            why = str(error) if isinstance(error, UnsupportedModel) else describe(error)
            raise UnsupportedModel(f"{type(self.model).__name__}, a {kind} model: {why}") from error
        finally:
            probed, _pass.probe, _pass.states = _pass.states, None, None
        if probed is not None:
            self.state_bytes = sum(value.nbytes for state in probed.after[0].values() for value in state.values())
        known = found.keys() | {one.layer for one in self.state_layers}
        if len(known) != text.num_hidden_layers:
            state = f", {len(known) - len(found)} keep state in transformers' cache" if self.state_layers else ""
            raise UnsupportedModel(
                f"{type(self.model).__name__}, a {self.model.config.model_type} model: {len(found)} of "
                f"{text.num_hidden_layers} layers attend through transformers' interface{state}"
            )
        return found

    def forward(
        self, backend: AttentionBackend, plan: Any, batch: FlatBatch, rows: states.StatePass | None = None
    ) -> Computed:
        """One pass; the cache is written. rows: their states, of a model with ``state_layers``."""
        kept: dict[int, Tensor] = {}
        heads: list[Tensor] = []
        with _within(backend, plan, rows, batch), contextlib.ExitStack() as hooks:
            if batch.adapters:
                assert self.adapters is not None, "a request has an adapter, and the model takes none"
                hooks.enter_context(self.adapters.applied(batch.adapters, len(batch.ids)))
            if batch.hidden:  # not `output_hidden_states`, which keeps those of all layers and all tokens
                head = self.model.get_output_embeddings()
                hook = head.register_forward_pre_hook(_head_hook(batch, heads))
                hooks.callback(hook.remove)
            for layer in sorted({*batch.keep, *(one for one, _places, _rows in batch.added)}):
                hook = self.decoder_layers[layer].register_forward_hook(_hook(layer, batch, kept))
                hooks.callback(hook.remove)
            logits = self._call(batch)
        if not batch.hidden:
            return Computed(logits, None, kept)
        return Computed(logits, heads[0][0] if self._keeps_rows else heads[0][0, batch.rows], kept)

    def embed(self, ids: Tensor) -> Tensor:
        """The input rows of token ids, ``[ids, hidden]``."""
        with torch.inference_mode():
            rows: Tensor = self.model.get_input_embeddings()(ids)
            return rows

    def _inputs(self, batch: FlatBatch) -> dict[str, Tensor]:
        if batch.embeddings is None:
            return {"input_ids": batch.ids[None]}
        places, rows = batch.embeddings
        return {"inputs_embeds": self.model.get_input_embeddings()(batch.ids).index_copy(0, places, rows)[None]}

    def _call(self, batch: FlatBatch) -> Tensor:
        options: dict[str, Any] = {"logits_to_keep": batch.rows} if self._keeps_rows else {}
        positions = batch.positions
        with torch.inference_mode():
            plain = not hooked() and adapted.current() is None
            if plain and (found := self.shorter(batch)) is not None:
                return found
            out = self.model(
                **self._inputs(batch),
                position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
                use_cache=False,
                return_dict=True,
                **options,
            )
            logits: Tensor = out.logits[0] if self._keeps_rows else out.logits[0, batch.rows]
            return logits.float()


def _head_hook(batch: FlatBatch, heads: list[Tensor]) -> Callable[[Any, Any], None]:
    """Note what the head of the vocabulary takes, within the pass of ``batch``: see `_hook`."""

    def before(_head: Any, given: Any) -> None:
        if _pass.batch is batch:
            heads.append(given[0])

    return before


def _hook(layer: int, batch: FlatBatch, kept: dict[int, Tensor]) -> Callable[[Any, Any, Any], Any]:
    """Keep a layer's output, then add to it what is to be added.

    It counts within the pass of ``batch`` only: another engine may compute by the same layers, in a thread of its own.
    """

    def after(_module: Any, _given: Any, output: Any) -> Any:
        if _pass.batch is not batch:
            return output
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if layer in batch.keep:
            kept[layer] = hidden[0]
        for one, places, rows in batch.added:
            if one == layer:
                hidden = hidden.index_add(1, places, rows[None])
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    return after


@contextlib.contextmanager
def _within(backend: AttentionBackend, plan: Any, rows: states.StatePass | None, batch: FlatBatch) -> Iterator[None]:
    _pass.backend, _pass.plan, _pass.states, _pass.batch = backend, plan, rows, batch
    try:
        yield
    finally:
        _pass.backend, _pass.plan, _pass.states, _pass.batch = None, None, None, None


def _by_row(one: states.StateLayer) -> Callable[..., Any]:
    """The layer's ``forward``: in a pass each row from its state on, else as transformers has it."""

    def forward(hidden_states: Tensor, *positional: Any, **options: Any) -> Any:
        if _pass.probe is None and _pass.states is None:
            return one.forward(hidden_states, *positional, **options)
        _pass.within = True
        try:
            if _pass.states is None:
                return one.forward(hidden_states, *positional, **options)
            return _pass.states.run(one, hidden_states, options)
        finally:
            _pass.within = False

    return forward


def _decoder_layers(model: Any, expected: int) -> Sequence[Any]:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    if layers is not None and len(layers) == 1 and type(layers[0]).__name__ == "DecoderLayers":
        layers = layers[0].layers  # of `kernels.decoder_layers`, which has joined them
    return layers if layers is not None and len(layers) == expected else ()


def end_ids_of(generation_config: Any, config: Any) -> frozenset[int]:
    """The tokens that end an answer, by the generation config."""
    found = getattr(generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(config, "eos_token_id", None)
    return frozenset([] if found is None else [int(found)] if isinstance(found, int) else map(int, found))
