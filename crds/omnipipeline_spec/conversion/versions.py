"""The versions of the resource: a hub and spokes, and the conversion of one object between any two.

Here: the table, and how an object goes from one version through the hub to another without a loss. Not here: what is
kept and how (`kept`), the API server's protocol (`omnipipeline_operator.conversion`). The hub is the version of the
types in `omnipipeline_spec.pipeline`; the operator and the commands read it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from omnipipeline_spec.conversion import kept
from omnipipeline_spec.types.errors import UnreadableSpec, quoted
from omnipipeline_spec.types.resource import GROUP, KIND, VERSION

Document: TypeAlias = Mapping[str, Any]
#: A pure function of an object's spec and status. Any field may be absent or null, required ones too: server-side apply
#: converts what is left of an object without a manager's fields. It may drop what the other version cannot express. It
#: does not change its argument.
Step: TypeAlias = Callable[[Document], Document]

_IDENTITY: Final = ("apiVersion", "kind", "metadata")


class Spoke(msgspec.Struct, frozen=True, kw_only=True):
    """A version beside the hub.

    A third step changes nothing more, whatever a step drops or adds: ``from_hub(to_hub(from_hub(hub)))`` is
    ``from_hub(hub)``, and the same the other way round. Then no round trip loses anything.
    """

    to_hub: Step
    from_hub: Step


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that can be converted."""

    hub: str = VERSION
    spokes: Mapping[str, Spoke] = {}

    def converted(self, thing: Any, version: str) -> dict[str, Any]:
        """An object in another version; of its metadata one annotation differs.

        thing:  as it came from the API server: anything.
        Raises: UnreadableSpec: it is not a pipeline of a version of this table; the message begins with the place.
        """
        source = self._version_of(thing)
        if version != self.hub and version not in self.spokes:
            raise UnreadableSpec(f"version {quoted(version)} is not among {self._names()}")
        document: Document = {key: value for key, value in thing.items() if key not in _IDENTITY}
        notes = kept.read(thing["metadata"])
        if source != version and source != self.hub:
            spoke = self.spokes[source]
            document, notes = _step(document, notes, source, self.hub, forth=spoke.to_hub, back=spoke.from_hub)
        if source != version and version != self.hub:
            spoke = self.spokes[version]
            document, notes = _step(document, notes, self.hub, version, forth=spoke.from_hub, back=spoke.to_hub)
        metadata = thing["metadata"] if source == version else kept.write(thing["metadata"], notes)
        return {"apiVersion": f"{GROUP}/{version}", "kind": KIND, "metadata": metadata, **document}

    def _version_of(self, thing: Any) -> str:
        if not isinstance(thing, Mapping):
            raise UnreadableSpec(f": expected an object, got {quoted(thing)}")
        if thing.get("kind") != KIND:
            raise UnreadableSpec(f".kind: expected {KIND}, got {quoted(thing.get('kind'))}")
        group, _, version = str(thing.get("apiVersion")).partition("/")
        if group != GROUP or (version != self.hub and version not in self.spokes):
            raise UnreadableSpec(
                f".apiVersion: expected {GROUP}/ and one of {self._names()}, got {quoted(thing.get('apiVersion'))}"
            )
        metadata = thing.get("metadata")
        if not isinstance(metadata, Mapping):
            raise UnreadableSpec(f".metadata: expected an object, got {quoted(metadata)}")
        for place, value in (
            ("metadata.annotations", metadata.get("annotations")),
            ("spec", thing.get("spec")),
            ("status", thing.get("status")),
        ):
            if value is not None and not isinstance(value, Mapping):
                raise UnreadableSpec(f".{place}: expected an object, got {quoted(value)}")
        return version

    def _names(self) -> str:
        return ", ".join(sorted({self.hub, *self.spokes}))


def _step(
    document: Document, notes: kept.Notes, source: str, target: str, *, forth: Step, back: Step
) -> tuple[Document, kept.Notes]:
    """One step between the hub and a spoke, with what the target kept put back and what the source loses kept."""
    made = forth(document)
    shown = back(made)
    own = tuple(kept.differences(document, shown))
    beside, now_beside = kept.beside(target, source), kept.beside(source, target)
    edited = kept.changed(own, notes.get(beside, ())) if target in notes else set()
    whole = kept.restored(made, kept.fresh(notes.get(target, ()), _concerned(document, made, edited, forth)))
    if not kept.same(back(whole), shown):
        whole = made  # a kept value is one that the source cannot show; another was written by hand, past who reads it
    others = tuple(kept.differences(whole, forth(back(whole)))) if own else ()
    rest = {version: each for version, each in notes.items() if version not in (target, beside)}
    return whole, {**rest, source: own, now_beside: others}


def _concerned(document: Document, made: Document, edited: set[kept.Place], forth: Step) -> set[kept.Place]:
    """The places in ``made``, which is ``forth(document)``, that come from these of the document."""
    found = {*edited}  # a field that both versions have by one name
    for place in edited:
        found |= {each.at for each in kept.differences(made, forth(kept.removed(document, place)))}
    return found


#: The table of this release. No second version is served yet (docs/operations.md says how one comes).
RELEASED: Final = Versions()
