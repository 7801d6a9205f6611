"""The ConversionReview protocol of apiextensions.k8s.io/v1: one review in, one review out.

Here: its shapes, and that every review gets an answer. Not here: HTTP (`serving`), the conversion of an object
(`omnipipeline_spec.conversion`). A review succeeds for all of its objects or fails as a whole; that is the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omnipipeline_spec.conversion.versions import Versions
from omnipipeline_spec.types.errors import UnreadableSpec, clipped, printable, quoted
from omnipipeline_spec.types.resource import GROUP

log = logging.getLogger(__name__)

API_VERSION: Final = "apiextensions.k8s.io/v1"
KIND: Final = "ConversionReview"


class NotAReview(Exception):
    """The body is not a review, and is answered with 400."""


def answer(body: bytes, versions: Versions) -> bytes:
    """The review with its response.

    Raises: NotAReview: the body is not JSON, or not a ConversionReview that has a uid.
    """
    try:
        review = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise NotAReview(f"the body is not JSON: {error}") from error
    asked = review.get("request") if isinstance(review, Mapping) else None
    uid = asked.get("uid") if isinstance(asked, Mapping) else None
    if not isinstance(asked, Mapping) or not isinstance(uid, str):
        raise NotAReview(f"expected a {KIND} with request.uid, got {quoted(review)}")
    response: dict[str, Any] = {"uid": uid}
    try:
        response |= {"convertedObjects": _converted(review, asked, versions), "result": {"status": "Success"}}
        return _encoded(response)
    except UnreadableSpec as error:
        message = printable(clipped(str(error)))
        log.warning("conversion failed: %s", message)
        return _encoded({"uid": uid, "convertedObjects": [], "result": {"status": "Failed", "message": message}})


def _encoded(response: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})


def _converted(review: Mapping[str, Any], asked: Mapping[str, Any], versions: Versions) -> list[dict[str, Any]]:
    """Raises: UnreadableSpec: begins with the place in the review."""
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if review.get(key) != expected:
            raise UnreadableSpec(f"{key}: expected {expected}, got {quoted(review.get(key))}")
    group, _, version = str(asked.get("desiredAPIVersion")).partition("/")
    if group != GROUP:
        given = quoted(asked.get("desiredAPIVersion"))
        raise UnreadableSpec(f"request.desiredAPIVersion: expected a version of {GROUP}, got {given}")
    things = asked.get("objects")
    if not isinstance(things, list):
        raise UnreadableSpec(f"request.objects: expected a list, got {quoted(things)}")
    return [_one(thing, f"request.objects[{index}]", version, versions) for index, thing in enumerate(things)]


def _one(thing: Any, place: str, version: str, versions: Versions) -> dict[str, Any]:
    try:
        return versions.converted(thing, version)
    except UnreadableSpec as error:
        text = str(error)
        raise UnreadableSpec(f"{place}{text if text[:1] in '.:' else f': {text}'}{_named(thing)}") from error
    except Exception as error:  # a step met what its author did not expect: this review fails, and the next is answered
        log.exception("%s%s", place, _named(thing))
        raise UnreadableSpec(f"{place}: {type(error).__name__}: {error}{_named(thing)}") from error


def _named(thing: Any) -> str:
    """The object's name for a message, if it has one."""
    metadata = thing.get("metadata") if isinstance(thing, Mapping) else None
    if not isinstance(metadata, Mapping) or "name" not in metadata:
        return ""
    return f" (of {clipped(str(metadata.get('namespace', '')), most=63)}/{clipped(str(metadata['name']), most=63)})"
