"""The values that a spec takes from Secrets and ConfigMaps, on a machine that has no cluster to ask: those of its own
file.

Here: the documents beside the pipeline, and what of `env`, `envFrom`, the API key and `code.configMapRef` they answer;
whatever they do not answer is named, with the cure. Not here: fields that one machine has no use for (`unsupported`),
the environment of a process (`launching`). Called by `local`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from omnipipeline_spec.cluster import EnvFrom, EnvVar, KeyReference
from omnipipeline_spec.pipeline import PipelineConfig
from stage_runtime.errors import ConfigurationError
from stage_runtime.settings import api_keys

ReferencedKind = Literal["Secret", "ConfigMap"]
#: A variable inside a value, as Kubernetes writes it; ``$$`` is a dollar sign.
_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")
_LINE_BREAKS = str.maketrans("", "", "\r\n")
_FILE_NAME = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]+")


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """The values that were found."""

    environment: dict[str, str]  #: Variables that replace those of the person's own environment.
    api_keys: tuple[str, ...] = ()
    code: dict[str, str] = {}  #: Files of ``code.configMapRef``: file name -> text.
    notices: tuple[str, ...] = ()  #: Objects and keys that were not found, one line each.


def resolve(
    spec: PipelineConfig, beside: Sequence[Mapping[str, Any]], environ: Mapping[str, str], *, namespace: str | None
) -> Resolved:
    """Everything in ``spec`` that names a Secret or a ConfigMap, and its plain variables.

    beside:  the other documents of the pipeline's file. environ: of `omni up`; what is not found may stand there.
    Raises:  ConfigurationError: an object that is there lacks a key that must be, or cannot be read.
    """
    objects = _Objects(beside, namespace)
    notices: list[str] = []
    environment = _environment(spec, objects, environ, notices)
    return Resolved(
        environment=environment,
        api_keys=_api_keys(spec.coordinator.http.api_key_secret_ref, objects),
        code=_code(spec, objects, notices),
        notices=tuple(notices),
    )


class _Objects:
    """Secrets and ConfigMaps of a file, by kind and name."""

    def __init__(self, documents: Sequence[Mapping[str, Any]], namespace: str | None) -> None:
        self._found: dict[tuple[str, str], Mapping[str, str]] = {}
        for document in documents:
            kind, metadata = document.get("kind"), document.get("metadata")
            if kind not in ("Secret", "ConfigMap") or not isinstance(metadata, Mapping):
                continue
            elsewhere = metadata.get("namespace") or namespace
            if elsewhere == (namespace or elsewhere):
                name = str(metadata.get("name"))
                self._found[kind, name] = _secret(name, document) if kind == "Secret" else _config_map(name, document)

    def all_of(self, kind: ReferencedKind, name: str) -> Mapping[str, str] | None:
        """Every key of an object; None when the file has none of that name."""
        return self._found.get((kind, name))

    def one(self, kind: ReferencedKind, reference: KeyReference, path: str) -> str | None:
        """One key's value; None when the object is not there, or the key is not and need not be.

        Raises: ConfigurationError: the object lacks the key.
        """
        held = self.all_of(kind, reference.name)
        if held is None:
            return None
        if reference.key not in held and not reference.optional:
            keys = ", ".join(sorted(held)) or "none"
            raise ConfigurationError(f"{path}: {kind} {reference.name!r} has no key {reference.key!r}; it has {keys}")
        return held.get(reference.key)


def _secret(name: str, document: Mapping[str, Any]) -> dict[str, str]:
    held: dict[str, str] = {}
    for key, value in _strings("Secret", name, document, "data").items():
        try:
            # The value may stand in lines, too, as the API server takes it.
            held[key] = base64.b64decode(value.translate(_LINE_BREAKS), validate=True).decode()
        except (binascii.Error, ValueError) as error:
            problem = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "is not base64; see stringData"
            raise ConfigurationError(f"Secret {name!r}: data.{key} {problem}") from error
    return held | _strings("Secret", name, document, "stringData")


def _config_map(name: str, document: Mapping[str, Any]) -> dict[str, str]:
    return _strings("ConfigMap", name, document, "data")


def _strings(kind: ReferencedKind, name: str, document: Mapping[str, Any], field: str) -> dict[str, str]:
    given = document.get(field) or {}
    if not isinstance(given, Mapping) or any(type(value) is not str for value in given.values()):
        raise ConfigurationError(
            f"{kind} {name!r}: {field} is not a map of strings; put numbers and booleans in quotes"
        )
    return dict(given)


def _environment(
    spec: PipelineConfig, objects: _Objects, environ: Mapping[str, str], notices: list[str]
) -> dict[str, str]:
    """The environment that a container gets: that of `envFrom`, then `env` in order, each seeing those before it."""
    found: dict[str, str] = {}
    for index, source in enumerate(spec.env_from):
        found |= _whole(source, index, objects, notices)
    for variable in spec.env:
        value = _value(variable, objects, environ, notices)
        if value is not None:
            found[variable.name] = value if variable.value_from else _expanded(value, found)
    for name, value in found.items():
        if "\0" in name + value or "=" in name:
            raise ConfigurationError(f"env.{name!r}: no environment can hold NUL bytes, or '=' in a name")
    return found


def _whole(source: EnvFrom, index: int, objects: _Objects, notices: list[str]) -> dict[str, str]:
    kind: ReferencedKind = "Secret" if source.secret_ref else "ConfigMap"
    reference = source.secret_ref or source.config_map_ref
    assert reference is not None  # the contract: exactly one of the two
    held = objects.all_of(kind, reference.name)
    if held is None:
        notices.append(f"envFrom[{index}]: {_absent(kind, reference.name)}, or set its variables in this shell")
        return {}
    return {f"{source.prefix or ''}{key}": value for key, value in held.items()}


def _value(variable: EnvVar, objects: _Objects, environ: Mapping[str, str], notices: list[str]) -> str | None:
    """A variable's own; None: only the environment of `omni up` may have it."""
    source = variable.value_from
    if source is None:
        return variable.value or ""
    path = f"env.{variable.name}"
    kind: ReferencedKind = "Secret" if source.secret_key_ref else "ConfigMap"
    reference = source.secret_key_ref or source.config_map_key_ref
    if reference is not None and objects.all_of(kind, reference.name) is not None:
        return objects.one(kind, reference, path)
    cure = _absent(kind, reference.name) + ", or" if reference else "one machine has no pod whose fields it could take:"
    taken = "; the one that is set here is taken" if variable.name in environ else ""
    notices.append(f"{path}: {cure} set the variable in this shell{taken}")
    return None


def _expanded(value: str, known: Mapping[str, str]) -> str:
    """``$(NAME)`` of variables before this one; unknown ones stay as they are."""

    def put(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else known.get(found[1], found[0])

    return _REFERENCE.sub(put, value)


def _api_keys(reference: KeyReference | None, objects: _Objects) -> tuple[str, ...]:
    if reference is None:
        return ()
    path = "coordinator.http.apiKeySecretRef"
    value = objects.one("Secret", reference, path)
    return () if value is None else api_keys(value.encode(), f"{path}: Secret {reference.name!r}")


def _code(spec: PipelineConfig, objects: _Objects, notices: list[str]) -> dict[str, str]:
    reference = spec.code.config_map_ref if spec.code else None
    if reference is None:
        return {}
    held = objects.all_of("ConfigMap", reference.name)
    if held is None:
        notices.append(
            f"code.configMapRef: {_absent('ConfigMap', reference.name)}, or its files into the pipeline's folder"
        )
        return {}
    wrong = [name for name in held if not _FILE_NAME.fullmatch(name)]
    if wrong:
        raise ConfigurationError(f"code.configMapRef: ConfigMap {reference.name!r}: {wrong[0]!r} is not a file name")
    return dict(held)


def _absent(kind: str, name: str) -> str:
    return f"{kind} {name!r} is missing here: put it into the pipeline's file"
