"""Loads a pipeline: the resource's YAML, a plain YAML or a Python module's `PipelineConfig(...)`, as a valid spec.

Here: telling the three forms apart; merging the defaults of the class that a plain file names, the file, and the
overrides, in rising precedence; the source of each value. Only overrides are applied to a Python value. Not here: YAML
itself (`goyaml`), paths of overrides (`overrides`), Python modules (`pythonfiles`), validation (`topology`). Called by
every command and, for resources from the API server, by the operator. Code is imported only for a file that a person
names, never for a resource or a text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from omnipipeline_spec.loading import goyaml, layering, nulls, overrides, pythonfiles
from omnipipeline_spec.pipeline import PipelineConfig, class_name
from omnipipeline_spec.types.canonical import NotCanonical, canonical, check_bounds, join
from omnipipeline_spec.types.errors import Fault, InvalidPipeline, UnreadableSpec
from omnipipeline_spec.types.quantities import is_pipeline_name, pipeline_slug
from omnipipeline_spec.types.resource import API_VERSION, CLASS_ANNOTATION, KIND
from omnipipeline_spec.types.values import fields_of, to_document, type_of
from omnipipeline_spec.validation import shapes, topology

MAX_NBYTES: Final = 3 << 20  # of a file: the API server accepts no larger request
_OBJECT_KEYS: Final = ("apiVersion", "kind", "metadata", "spec", "status")


class LoadedPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A valid spec and its sources."""

    name: str  #: A valid name of a resource.
    spec: PipelineConfig
    source: str  #: The file, as it was given.
    sources: Mapping[str, str]  #: Path of each value that is set -> what set it.
    metadata: Mapping[str, Any] = {}  #: Metadata of a resource: labels, annotations, namespace.
    beside: tuple[Mapping[str, Any], ...] = ()  #: The file's other documents: a Secret, a ConfigMap.
    dropped: tuple[Fault, ...] = ()  #: A warning for each null entry that sets nothing.


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a spec and its source."""

    path: str
    value: Any
    source: str


class _ParsedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed source, before merging."""

    document: Any
    source: str
    kind: Literal["resource", "plain", "python"]
    #: The folder to look in for the class that a plain file names; None: it is not imported.
    folder: Path | None = None
    lines: Mapping[str, int] = {}  #: Path as `_folded` gives it -> line.
    name: str | None = None
    metadata: Mapping[str, Any] = {}
    faults: tuple[Fault, ...] = ()


def load(path: str | Path, *, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """The pipeline of a file, with ``path=value`` overrides applied.

    path:   ``pipeline.yaml``, ``pipeline.py``, ``pipeline.py:name`` or ``package.module:name`` of a Python value.
    Raises: UnreadableSpec: the source contains no pipeline; InvalidPipeline: carries all faults.
    """
    text = str(path)
    found = pythonfiles.locate(text)
    if found is not None:
        read = _ParsedSource(document=_document(found.load(), text), source=text, kind="python")
        return _finish(read, overrides, fallback=found.stem)
    return loads(_text(path), source=text, overrides=overrides, folder=Path(path).resolve().parent)


def _text(path: str | Path) -> str:
    """A file's text. Reads at most `MAX_NBYTES`: a device or a pipe may have no end."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_NBYTES + 1)
        if len(content) > MAX_NBYTES:
            raise UnreadableSpec(f"{path}: is larger than {MAX_NBYTES >> 20} MiB")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableSpec(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def loads(
    content: str, *, source: str = "the text", overrides: Sequence[str] = (), folder: Path | None = None
) -> LoadedPipeline:
    """The pipeline of a YAML text; raises as `load` does.

    folder: where to look first for the class that ``config_cls`` names. A text that names one is refused without it.
    """
    documents = goyaml.documents(content, source)
    document = _only(documents, source)
    loaded = _finish(_yaml(document, source, folder), overrides, fallback=Path(source).stem)
    others = (each.value for each in documents if each is not document and isinstance(each.value, Mapping))
    return msgspec.structs.replace(loaded, beside=tuple(others))


def from_resource(resource: Mapping[str, Any], *, source: str = "the resource") -> LoadedPipeline:
    """The pipeline of a resource as the API server gives it; raises InvalidPipeline as `load` does."""
    try:
        check_bounds(resource)
    except NotCanonical as error:
        raise InvalidPipeline([Fault(path=error.place, message=error.message)], source=source) from None
    return _finish(_resource(resource, {}, source), (), fallback="pipeline")


def explain(loaded: LoadedPipeline, path: str | None = None) -> tuple[Explained, ...]:
    """Every value of the spec, defaults included, with its source.

    path: only what it names, written as in ``--set``; a place inside a free-form value gives that value.
    Raises: UnreadableSpec: it names nothing.
    """
    found: list[Explained] = []
    _explain(loaded.spec, "", loaded.sources, found)
    if path is None:
        return tuple(found)
    label = f"--explain {path}"
    document = to_document(loaded.spec)
    places = overrides.select(document, path, label)
    named = tuple(each for each in found if any(_names(place, each, loaded.sources) for place in places))
    if not named:
        raise UnreadableSpec(f"{label}: nothing is there")
    return named


def _only(documents: Sequence[goyaml.Document], source: str) -> goyaml.Document:
    """The one pipeline of a file; other documents (a Secret) may be in the same file."""
    pipelines = [each for each in documents if isinstance(each.value, Mapping) and each.value.get("kind") == KIND]
    found = pipelines if len(documents) > 1 else documents
    if len(found) == 1:
        return found[0]
    if len(documents) == 0:
        raise UnreadableSpec(f"{source}: the file is empty")
    raise UnreadableSpec(f"{source}: has {len(pipelines)} documents of kind {KIND}; exactly one is required")


def _document(spec: PipelineConfig, source: str) -> Any:
    """A Python value as a document. A name derived from the model path is left out: it follows an override.

    Raises: InvalidPipeline: it holds what no document can, such as a key that is not a string. Merging needs documents.
    """
    try:
        check_bounds(spec)
        document = to_document(spec)
        canonical(document)
    except NotCanonical as error:
        first = Fault(path=error.place, message=error.message)
        raise InvalidPipeline(topology.faults(spec) or [first], source=source) from None
    if document.get("name") == document.get("modelPath"):
        document.pop("name", None)
    return document


def _yaml(document: goyaml.Document, source: str, folder: Path | None) -> _ParsedSource:
    value = document.value
    if not isinstance(value, Mapping):
        raise UnreadableSpec(f"{source}: a pipeline is a map with stages, this is {value!r:.60}")
    if "apiVersion" in value or "kind" in value:
        return _resource(value, document.lines, source)
    return _ParsedSource(
        document=value, source=source, kind="plain", lines=_by_folded_path(document.lines), folder=folder
    )


def _resource(value: Mapping[str, Any], lines: Mapping[str, int], source: str) -> _ParsedSource:
    if value.get("kind") != KIND or value.get("apiVersion") != API_VERSION:
        given = f"{value.get('apiVersion')} {value.get('kind')}"
        raise UnreadableSpec(f"{source}: is {given}; a pipeline is {API_VERSION} {KIND}")
    faults = [_unknown(key, _OBJECT_KEYS, "") for key in value if key not in _OBJECT_KEYS]
    metadata = value.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    faults += [_unknown(key, _METADATA_KEYS, "metadata") for key in metadata if key not in _METADATA_KEYS]
    name = metadata.get("name")
    if not isinstance(name, str) or not is_pipeline_name(name):
        message = "is required" if name is None else f"{name!r} must be at most 38 lower case letters, digits and -, "
        message += "" if name is None else "a letter first, no - last, and not end in -peers"
        faults.append(Fault(path="metadata.name", message=message, names=(str(name),) if name else ()))
    return _ParsedSource(
        document=value.get("spec") if value.get("spec") is not None else {},
        source=source,
        kind="resource",
        lines=_by_folded_path({path.removeprefix("spec").removeprefix("."): line for path, line in lines.items()}),
        name=name if isinstance(name, str) else None,
        metadata=metadata,
        faults=tuple(faults),
    )


_METADATA_KEYS: Final = (
    "name",
    "namespace",
    "labels",
    "annotations",
    "generateName",
    "finalizers",
    "ownerReferences",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
)


def _unknown(key: str, known: Sequence[str], path: str) -> Fault:
    near = shapes.nearest(key, known)
    return Fault(
        path=join(path, key), message="unknown key" + (f"; did you mean {near}?" if near else ""), names=(key,)
    )


def _finish(read: _ParsedSource, given: Sequence[str], *, fallback: str) -> LoadedPipeline:
    """Merge and validate; every fault gets its line."""
    sources: layering.Sources = {}
    laid = _over_class(read, sources)
    faults = list(read.faults)
    dropped = list(_nulls(read))
    if given and isinstance(laid, dict):
        laid = overrides.apply(laid, given, sources, dropped)
    spelling: shapes.Spelling = "resource" if read.kind == "resource" else "plain"
    document, malformed = shapes.check(laid, PipelineConfig, spelling=spelling)
    spec, unsound = topology.of_document(document)
    faults += [*malformed, *unsound]
    if faults or spec is None:
        raise InvalidPipeline([_located(fault, read, sources) for fault in faults], source=read.source)
    name = read.name if read.kind == "resource" else spec.name
    named = pipeline_slug(name or fallback)
    if read.kind == "resource":
        spec = msgspec.structs.replace(spec, name=named, config_cls=_noted_class(read.metadata))
    return LoadedPipeline(
        name=named,
        spec=spec,
        source=read.source,
        sources=sources,
        metadata=read.metadata,
        dropped=nulls.warnings(dropped),
    )


def _nulls(read: _ParsedSource) -> Iterator[Fault]:
    """The null entries that set nothing. None is a value in Python."""
    if read.kind != "python":
        for path in nulls.places(read.document, type_of(PipelineConfig), ""):
            yield nulls.dropped(path, line=_line(path, read.lines))


def _noted_class(metadata: Mapping[str, Any]) -> str | None:
    """The class that a resource was made from, by its annotation. It is never imported."""
    annotations = metadata.get("annotations")
    noted = annotations.get(CLASS_ANNOTATION) if isinstance(annotations, Mapping) else None
    return noted if isinstance(noted, str) and re.fullmatch(pythonfiles.CLASS_NAME, noted) else None


def _over_class(read: _ParsedSource, sources: layering.Sources) -> Any:
    """The document; of a plain file merged over the defaults of the class it names."""
    if not isinstance(read.document, Mapping):
        return read.document
    plain = read.kind == "plain"
    document = shapes.respell(read.document, PipelineConfig) if plain else dict(read.document)
    config_cls = document.get("configCls") if plain else None
    base: dict[str, Any] = {}
    if isinstance(config_cls, str) and config_cls not in ("", class_name(PipelineConfig)):
        if read.folder is None:
            raise UnreadableSpec(f"config_cls {config_cls}: is imported only when the pipeline is read from a file")
        base = _document(pythonfiles.defaults(config_cls, read.folder), f"config_cls {config_cls}")
        base.pop("configCls", None)
        layering.record(base, sources, lambda _: f"default of {config_cls}", "", "")
    return layering.merge(base, document, sources, functools.partial(_place, read))


def _located(fault: Fault, read: _ParsedSource, sources: layering.Sources) -> Fault:
    """The fault with its line, or with the override that caused it."""
    source = sources.get(fault.path, "")
    if source.startswith("--set"):
        return msgspec.structs.replace(fault, message=f"{fault.message} (from {source})")
    return msgspec.structs.replace(fault, line=_line(fault.path, read.lines))


def _place(read: _ParsedSource, path: str) -> str:
    line = _line(path, read.lines)
    return f"{read.source}, line {line}" if line else read.source


def _line(path: str, lines: Mapping[str, int]) -> int | None:
    """The line of a path, or of the nearest value around it; a file may use snake_case."""
    path = _folded(path)
    while path:
        if path in lines:
            return lines[path]
        cut = max(path.rfind("."), path.rfind("["))
        path = path[: max(cut, 0)]
    return None


def _by_folded_path(lines: Mapping[str, int]) -> dict[str, int]:
    return {_folded(path): line for path, line in lines.items()}


def _folded(path: str) -> str:
    return path.replace("_", "").lower()


def _explain(value: msgspec.Struct, path: str, sources: Mapping[str, str], found: list[Explained]) -> None:
    for field in fields_of(type(value)):
        held = getattr(value, field.name)
        place = join(path, field.encode_name)
        if isinstance(held, msgspec.Struct):
            _explain(held, place, sources, found)
        elif isinstance(held, tuple) and any(isinstance(item, msgspec.Struct) for item in held):
            for index, item in enumerate(held):
                _explain(item, f"{place}[{index}]", sources, found)
        else:
            source = _source(place, sources)
            found.append(Explained(path=place, value=to_document(held), source=source))


def _names(place: str, one: Explained, sources: Mapping[str, str]) -> bool:
    """Whether a place is the value, contains it, or is inside it: where something was set, or nothing is."""
    if _is_at(one.path, place):
        return True
    return _is_at(place, one.path) and (one.value is None or any(_is_at(known, place) for known in sources))


def _is_at(path: str, place: str) -> bool:
    return path == place or path.startswith((f"{place}.", f"{place}["))


def _source(path: str, sources: Mapping[str, str]) -> str:
    inside = [source for place, source in sources.items() if _is_at(place, path)]
    return ", ".join(dict.fromkeys(inside)) or "default"
