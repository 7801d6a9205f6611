"""The settings of a stage's adapters, checked. Names are vLLM's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from stage_runtime.api import Autoregressive
from stage_runtime.errors import ConfigurationError
from stage_runtime.wire.parts import ADAPTER_NAME, PATH_LIMIT

MOST_ADAPTERS: Final = 64  # each is a label of metrics, and a part of every beat
MOST_RANK: Final = 512  # as vLLM's
#: An adapter's name stands in metrics, logs and `/v1/models`.
NAME: Final = re.compile(ADAPTER_NAME)


class LoRASettings(msgspec.Struct, frozen=True, kw_only=True):
    """modules: folders by names, loaded with the stage. most: adapters in memory. rank: of each at most. folders: those
    that are loaded later lie in one of these; None: beside one of ``modules``.
    """

    modules: Mapping[str, str]
    most: int
    rank: int
    folders: Sequence[str] | None = None

    def outside(self, path: str) -> str | None:
        """The reason why a folder may not be read: it is in none of those that are allowed, also by way of a link or
        of ``..``.
        """
        roots = _beside(self.modules) if self.folders is None else self.folders
        real = os.path.realpath(os.path.expanduser(path))
        if any(os.path.commonpath([real, root]) == root for root in map(os.path.realpath, roots)):
            return None
        where = ", ".join(roots) or "no folder"
        if self.folders is not None:
            return f"{path:.300}: adapters are loaded from {where} (lora_folders)"
        return (
            f"{path:.300}: adapters are loaded from {where}, beside those of lora_modules, unless lora_folders is set"
        )


def checked(spec: Autoregressive) -> LoRASettings | None:
    """None: the stage takes no adapters. Raises: ConfigurationError: a value is not allowed; it is named."""
    modules = {} if spec.lora_modules is None else spec.lora_modules
    most, rank = spec.max_loras, spec.max_lora_rank
    if not isinstance(modules, Mapping):
        raise _refused("lora_modules", modules, "expected folders by names")
    for name, path in modules.items():
        if (problem := name_problem(name)) is not None:
            raise _refused("lora_modules", {name: path}, problem)
        if name == spec.model:
            raise _refused("lora_modules", {name: path}, "this is the name of the model")
        if (problem := path_problem(path)) is not None:
            raise _refused("lora_modules", {name: path}, problem)
    if type(most) is not int or not 0 <= most <= MOST_ADAPTERS:
        raise _refused("max_loras", most, f"from 0 to {MOST_ADAPTERS}; 0: as many as lora_modules has")
    if len(modules) > (most or MOST_ADAPTERS):
        raise _refused("max_loras", most, f"lora_modules has {len(modules)}, of {most or MOST_ADAPTERS} at most")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise _refused("max_lora_rank", rank, f"from 1 to {MOST_RANK}")
    folders = spec.lora_folders
    if folders is not None and (isinstance(folders, str) or not isinstance(folders, Sequence)):
        raise _refused("lora_folders", folders, "expected a list of folders")
    for folder in folders or ():
        if path_problem(folder) is not None or not os.path.isabs(folder):
            raise _refused("lora_folders", folders, f"expected absolute paths, got {folder!r:.200}")
    if not modules and not most:
        return None
    if spec.engine != "own":
        raise _refused("engine", spec.engine, "adapters are for engine='own'")
    return LoRASettings(modules=dict(modules), most=most or len(modules), rank=rank, folders=folders)


def name_problem(name: object) -> str | None:
    """The reason why an adapter cannot have this name."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return None
    return "an adapter's name is 1 to 128 characters of A-Z a-z 0-9 . _ / - and begins with a letter or digit"


def path_problem(path: object) -> str | None:
    """The reason why this cannot be a folder."""
    if isinstance(path, str) and 0 < len(path) <= PATH_LIMIT and "\0" not in path:
        return None
    return "expected the path of a folder with adapter_config.json and adapter_model.safetensors"


def _beside(modules: Mapping[str, str]) -> Sequence[str]:
    """The parent folders of those that are listed. The root is not one of them: all paths lie in it."""
    parents = (os.path.dirname(os.path.abspath(os.path.expanduser(path))) for path in modules.values())
    return sorted({parent for parent in parents if os.path.dirname(parent) != parent})


def _refused(name: str, value: object, problem: str) -> ConfigurationError:
    return ConfigurationError(f"omni.Autoregressive({name}={value!r:.300}): {problem}")
