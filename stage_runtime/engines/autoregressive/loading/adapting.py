"""The layers of a model that take LoRA adapters: noted before it is cut and packed, found afterwards. It serves
`loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.lora import sites
from stage_runtime.engines.autoregressive.lora.layers import LoRALayers
from stage_runtime.engines.autoregressive.lora.registry import Adapters
from stage_runtime.engines.autoregressive.lora.settings import LoRASettings, checked
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import Ranks
from stage_runtime.errors import ConfigurationError, RequestError

NAME = "omni.Autoregressive(lora_modules=…)"


class PlannedAdapters:
    """The adapters of a model that is being prepared."""

    def __init__(self, settings: LoRASettings, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.settings = settings
        #: Bytes of as many adapters as there may be, of the largest rank on all layers; after `layers`.
        self.nbytes = 0
        self._shapes = shapes

    def layers(self, paged: PagedModel, ranks: Ranks | None, *, loops: bool = False) -> LoRALayers:
        """``paged``: prepared. loops: as of `preparing.prepare`.

        Raises: ConfigurationError: none of its layers takes adapters.
        """
        shapes = sites.without_states(self._shapes, sites.stateful(paged))
        if not shapes:
            raise ConfigurationError(f"{NAME}: {type(paged.model).__name__} has no linear layer that takes adapters")
        size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        made = LoRALayers(
            sites.sites_of(paged.model, shapes, size),
            shapes,
            most_rank=self.settings.rank,
            dtype=paged.dtype,
            device=paged.device,
            rank=rank,
            ranks=size,
            loops=loops,
        )
        self.nbytes = made.most_nbytes * self.settings.most
        return made


def planned(spec: Autoregressive, model: Any, after_step: Callable[..., Any] | None = None) -> PlannedAdapters | None:
    """Note the layers of ``model`` before it is changed. None: the stage takes no adapters.

    Raises: ConfigurationError: a value is not allowed, or does not go with the model.
    """
    settings = checked(spec)
    if settings is None:
        return None
    if after_step is not None:
        raise ConfigurationError(f"{NAME}: a decoder with after_step makes its own next rows, without adapters")
    return PlannedAdapters(settings, sites.shapes_of(model))


def load(adapters: Adapters, settings: LoRASettings, progress: Callable[[str], None]) -> None:
    """Load what the stage lists. Raises: ConfigurationError: it names the adapter."""
    for name, path in settings.modules.items():
        progress(f"loading the adapter {name}")
        try:
            adapters.load(name, path)
        except RequestError as error:
            raise ConfigurationError(f"omni.Autoregressive(lora_modules={{{name!r}: …}}): {error.message}") from error
