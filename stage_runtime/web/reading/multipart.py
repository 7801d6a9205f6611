"""A multipart body, already read and bounded, as its parts. Pure; called by the routes that take files.

Not Starlette's `request.form()`: that spools to temporary files what is in memory and counted there already, and hands
the bytes over in pieces that would be joined again here.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from stage_runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

#: It warns of each form that it cannot read; anybody could fill the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

MAX_PARTS: Final = 256
MAX_NAME: Final = 256  # bytes of a part's name: it becomes a key of ``inputs``; and of its media type
MAX_FILE_NAME: Final = 1024
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class FormPart(msgspec.Struct, frozen=True, kw_only=True):
    """One field (``filename`` is None) or file."""

    name: str
    filename: str | None
    content_type: str
    data: bytes


def is_form(content_type: str | None) -> bool:
    return (content_type or "").lower().startswith("multipart/form-data")


def boundary_of(content_type: str | None) -> bytes:
    """The line between the parts of a form, which clients draw anew for each; empty: it has none, or is not a form."""
    if not is_form(content_type):
        return b""
    _, options = parse_options_header(content_type)
    return options.get(b"boundary", b"")


def parse(body: bytes, content_type: str) -> list[FormPart]:
    """All parts in order.

    Raises: InvalidRequest: no boundary, a torn or malformed body, too many parts, a part without a sane name.
    """
    boundary = boundary_of(content_type)
    if not boundary:
        raise InvalidRequest("content-type: multipart/form-data without a boundary")
    collector = _Collector()
    try:
        parser = MultipartParser(boundary, collector.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the body is not multipart/form-data: {error}") from None
    if not collector.ended:
        raise InvalidRequest("the body is not multipart/form-data: its last boundary is missing")
    return collector.parts


class _Collector:
    """The parser's callbacks."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.ended = False
        self._field = bytearray()
        self._value = bytearray()
        self._headers: dict[str, str] = {}
        self._data = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._end_header,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        self._headers, self._data = {}, bytearray()

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._field.decode("latin-1").lower()] = self._value.decode("latin-1")
        self._field, self._value = bytearray(), bytearray()

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._data += memoryview(data)[start:end]

    def _end(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", ""))
        name, filename = options.get(b"name"), options.get(b"filename")
        if not name:
            raise InvalidRequest("the form has a part without a name")
        content_type = self._headers.get("content-type", "application/octet-stream")
        part = FormPart(
            name=self._text(name, "name", MAX_NAME),
            filename=None if filename is None else self._text(filename, "file name", MAX_FILE_NAME),
            content_type=self._text(content_type.encode("latin-1"), "media type", MAX_NAME),
            data=bytes(self._data),
        )
        self.parts.append(part)

    def _on_end(self) -> None:
        self.ended = True

    def _text(self, raw: bytes, what: str, most: int) -> str:
        """A part's name or file name: it goes into values, messages and logs."""
        place = f"part {len(self.parts)}"
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{place}: a {what} that is not UTF-8") from None
        if len(raw) > most or _CONTROL.search(text):
            raise InvalidRequest(f"{place}: a {what} has at most {most} bytes, no control characters")
        return text
