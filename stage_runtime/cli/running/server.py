"""A client of the coordinator's HTTP routes. Called by the commands that look at a running pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from stage_runtime.cli import options
from stage_runtime.cli.running import runs
from stage_runtime.errors import ConfigurationError
from stage_runtime.web.listening import pinning

TIMEOUT_S: Final = 600.0  # a report of a long profile takes minutes


class CoordinatorClient:
    """The admin routes of one pipeline."""

    def __init__(self, url: str, api_key: str | None, certificate: Path | None = None) -> None:
        """certificate: a file with what a coordinator of this machine shows; None: an authority must have signed it.

        Raises: ConfigurationError: the URL is not one, no header can carry the key, the certificate cannot be read.
        """
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url
        self._errors = httpx.HTTPError
        try:
            # trust_env=False: HTTP_PROXY would get requests to the loopback, and the API key. ~/.netrc would win over
            # the key. SSL_CERT_FILE and SSL_CERT_DIR count all the same.
            verify = httpx.create_ssl_context() if certificate is None else pinning.pinned(certificate)
            self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers, trust_env=False, verify=verify)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"{url}: {error}") from error
        except OSError as error:
            raise ConfigurationError(f"{certificate}: {error.strerror or error}") from error
        except UnicodeEncodeError:
            raise ConfigurationError("the API key has characters that are not ASCII") from None

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        return self._json(path, self._ask("POST", path, json=body, timeout=timeout_s))

    def json(self, path: str) -> dict[str, Any]:
        return self._json(path, self.get(path))

    def get(self, path: str) -> bytes:
        return self._ask("GET", path)

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, **body: Any) -> bytes:
        """Raises: ConfigurationError: the request is not answered, or refused."""
        try:
            answer = self._http.request(method, path, **body)
        except self._errors as error:
            raise ConfigurationError(f"{self._url}: {error or type(error).__name__}") from error
        if answer.status_code >= 300:  # a coordinator redirects nothing
            raise ConfigurationError(f"{self._url}{path}: {_reason(answer.content, answer.status_code)}")
        return answer.content

    def _json(self, path: str, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self.foreign(path)
        return answer

    def foreign(self, path: str) -> ConfigurationError:
        """The error for an answer that no coordinator gives."""
        return ConfigurationError(f"{self._url}{path}: this is not a coordinator of a pipeline")


def _reason(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return f"status {status}"


def server_options(function: Any) -> Any:
    """Options that name the pipeline: a running `omni up`, or a URL (of a port-forward, for example)."""
    function = click.option("--api-key", envvar="OMNI_API_KEY", help="API key, if the pipeline requires one.")(function)
    function = click.option("--url", help="URL of the coordinator. Default: the `omni up` that runs here.")(function)
    return runs.run_options(function)


@contextmanager
def server(
    url: str | None, api_key: str | None, pipeline: str | None, pid: int | None, base_path: str | None
) -> Iterator[CoordinatorClient]:
    with options.errors_as_messages():
        at = (url, None) if url else runs.url(pipeline=pipeline, pid=pid, base_path=base_path)
        client = CoordinatorClient(at[0], api_key, at[1])
        try:
            yield client
        except UnicodeEncodeError as error:
            if error.reason == "surrogates not allowed":  # text of another program
                raise client.foreign("") from error
            raise  # our output's, not the answer's
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # JSON of another program
            raise client.foreign("") from error
        finally:
            client.close()
