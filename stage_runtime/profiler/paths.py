"""The folder of a run's files: below ``OMNI_PROFILE_ROOT``, whatever a client asks for. Pure but for root and links."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import string
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

from stage_runtime.errors import ConfigurationError

PLACEHOLDERS: Final = ("run_id", "stage", "pid", "rank", "host", "incarnation")
DEFAULT_TEMPLATE: Final = "{run_id}/traces/{stage}_{pid}"
TRACE_SUFFIX: Final = ".trace.json.gz"
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_run_id(run_id: str) -> str:
    """Raises: ConfigurationError: it cannot be the name of a folder."""
    if not _RUN_ID.fullmatch(run_id):
        problem = "1 to 64 letters, digits, dots, dashes and underscores, the first one a letter or a digit"
        raise ConfigurationError(f"run_id: {run_id[:80]!r} is not {problem}")
    return run_id


def prepare_root(root: Path) -> None:
    """Make the root, for this user alone, where it does not exist.

    Raises: ConfigurationError: it lies where every user may write, as the default does, and another user made it.
    """
    with contextlib.suppress(OSError):  # it is there; or the run's own folder cannot be made either, which is reported
        root.mkdir(mode=0o700, parents=True)
    try:
        owner, around = os.lstat(root).st_uid, os.stat(root.parent).st_mode
    except OSError:
        return
    if is_foreign(owner, around, {0, os.geteuid(), os.stat("/").st_uid}):  # in a user namespace root may be another
        problem = f"{root} belongs to user {owner}, who could replace what is written there"
        raise ConfigurationError(f"{problem}: set OMNI_PROFILE_ROOT to a folder of your own")


def is_foreign(owner: int, around: int, trusted: Set[int]) -> bool:
    """Whether a folder with this owner, in one of mode ``around``, may have been put there by anybody."""
    return bool(around & stat.S_IWOTH) and owner not in trusted


def event_dir(root: Path, run_id: str, given: str | None) -> Path:
    """The folder of a run's event files. given: None: the run's own below the root.

    Raises: ConfigurationError: it is not below the root.
    """
    return _below(root, given if given is not None else f"{run_id}/events", "event_dir")


def check_template(root: Path, template: str) -> str:
    """A template of trace files' paths, with the suffix, and different for every process.

    Raises: ConfigurationError: an unknown placeholder, broken braces, or a path that is not below the root.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"trace_path_template: {template[:200]!r}: {error}") from None
    names = []
    for _, name, form, conversion in parsed:
        if name is None:
            continue
        if name not in PLACEHOLDERS or form or conversion:
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            raise ConfigurationError(f"trace_path_template: {{{name[:80]}}} is not a placeholder; there are {known}")
        names.append(name)
    path = template.removesuffix(TRACE_SUFFIX)
    if "pid" not in names and "incarnation" not in names:
        path += "_{stage}_{pid}"
    _below(root, path.format(**dict.fromkeys(PLACEHOLDERS, "x")), "trace_path_template")
    return path + TRACE_SUFFIX


def relative(root: Path, path: str) -> str:
    """The part of a path or template below this process's root. Other processes' roots may be elsewhere."""
    for base in (root, root.resolve()):
        if path.startswith(f"{base}/"):
            return path.removeprefix(f"{base}/").lstrip("/")
    return path


def trace_path(root: Path, template: str, facts: Mapping[str, object], own_folder: str | None = None) -> Path:
    """The trace file of one process.

    facts: a value for each of `PLACEHOLDERS`. own_folder: which tells this process from others of the same storage; the
        file is in it unless the template itself tells them apart.
    """
    names = {name for _, name, _, _ in string.Formatter().parse(template)}
    if own_folder is not None and not names & {"host", "incarnation"}:
        folder, slash, name = template.rpartition("/")
        template = f"{folder}{slash}{own_folder}/{name}"
    safe = {name: re.sub(r"[^A-Za-z0-9._-]", "_", str(facts[name])) or "_" for name in PLACEHOLDERS}
    return _below(root, template.format(**safe), "trace_path_template")


def _below(root: Path, given: str, field: str) -> Path:
    """Raises: ConfigurationError: ``given``, relative to the root or absolute, leaves it, by links too."""
    if not given or "\0" in given or len(given) > 4096:
        raise ConfigurationError(f"{field}: {given[:80]!r} is not a path")
    try:
        base = root.resolve()
        path = (base / given).resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"{field}: {given[:200]}: {error}") from None
    if path == base or not path.is_relative_to(base):
        raise ConfigurationError(f"{field}: {given[:200]} is not below {root} (OMNI_PROFILE_ROOT)")
    return path
