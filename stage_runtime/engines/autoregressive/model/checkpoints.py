"""The ``model`` of a stage: a folder, a GGUF file, or a name at the model hub. Called by `models` and `encoding`.

transformers takes a wrong path for a name at the hub, or asks for packages that would not help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stage_runtime.errors import ConfigurationError

INSTEAD: Final = "give a checkpoint's folder, a .gguf file, or a name at the model hub"
#: A folder of a checkpoint has one of these.
CONFIGS: Final = ("config.json", "tokenizer_config.json", "tokenizer.json")


def local(model: str) -> Path | None:
    """The folder or file that ``model`` names; None: it is a name at the hub.

    Raises: ConfigurationError: no checkpoint is there.
    """
    if not model.strip():
        raise _refused(model, "this text is empty")
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).exists() for name in CONFIGS):
            raise _refused(model, "this folder has no config.json, so it is not a checkpoint")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise _refused(model, "this file does not exist")
        return path
    if path.exists():
        raise _refused(model, "this file is not a checkpoint")
    if model.startswith(("/", "./", "../", "~")):
        raise _refused(model, "this folder does not exist")
    return None


def _refused(model: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"model {model!r}: {problem}: {INSTEAD}")
