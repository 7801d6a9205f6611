"""How an S3-like store is reached: endpoint, region and credentials, from the variables that AWS' own tools read.

Here: reading and checking these, and keeping them out of what is logged. Not here: requests (`source`). The object
store's library ends the process on a value that cannot be part of a header, so each value is checked before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from stage_runtime.errors import ConfigurationError

ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
KEY: Final = "AWS_ACCESS_KEY_ID"
SECRET: Final = "AWS_SECRET_ACCESS_KEY"
TOKEN: Final = "AWS_SESSION_TOKEN"
UNSIGNED: Final = "AWS_SKIP_SIGNATURE"
_VISIBLE: Final = re.compile(r"[\x21-\x7e]+")
_MASK: Final = "***"
_LINE_CHARACTERS: Final = 400


class Access:
    """The settings of a client of one store.

    Raises: ConfigurationError: a variable's value cannot be used; names the variable, and never its value.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.endpoint = _endpoint(environ)
        given = {name: _value(environ, name) for name in (KEY, SECRET, TOKEN)}
        if bool(given[KEY]) != bool(given[SECRET]):
            there, lacking = (KEY, SECRET) if given[KEY] else (SECRET, KEY)
            raise ConfigurationError(f"{there} is set and {lacking} is not")
        self._secrets = sorted((each for each in given.values() if each), key=len, reverse=True)
        wanted = {
            "aws_endpoint": self.endpoint,
            "aws_region": next((found for each in REGIONS if (found := _value(environ, each))), "us-east-1"),
            "aws_access_key_id": given[KEY],
            "aws_secret_access_key": given[SECRET],
            "aws_session_token": given[TOKEN],
            "aws_skip_signature": _value(environ, UNSIGNED),
        }
        #: Settings of obstore's S3Store.
        self.config = {name: value for name, value in wanted.items() if value}
        #: Follows an error where the library has asked the machine's own role for credentials, as AWS' tools do.
        self._advice = "" if given[KEY] or _value(environ, UNSIGNED) else f"; {KEY} and {SECRET} are not set"

    def line(self, error: BaseException) -> str:
        """An error of the store's library in one line, without credentials: a server may repeat what it was sent."""
        text = " ".join(str(error).partition("Debug source:")[0].split())
        for each in self._secrets:
            text = text.replace(each, _MASK)
        return text[:_LINE_CHARACTERS] + self._advice


def _endpoint(environ: Mapping[str, str]) -> str | None:
    for name in ENDPOINTS:
        value = _value(environ, name)
        if not value:
            continue
        try:
            parts = urlsplit(value)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            sound = False
        if not sound or "@" in value or parts.query or parts.fragment:
            raise ConfigurationError(f"{name}: expected http://HOST:PORT or https://HOST, without a user or a query")
        return value
    return None


def _value(environ: Mapping[str, str], name: str) -> str | None:
    """A variable without blanks at its ends: a Secret made of a file often ends in a line feed."""
    value = environ.get(name, "").strip()
    if value and not _VISIBLE.fullmatch(value):
        raise ConfigurationError(f"{name}: expected visible ASCII characters without blanks")
    return value or None
