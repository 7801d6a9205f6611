"""OpenTelemetry's environment variables for traces. Pure.

Source: OpenTelemetry specification, "Environment Variables" and "OTLP Exporter". Spans go over HTTP in protobuf only.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

import msgspec

from stage_runtime.errors import ConfigurationError

#: Sampler -> the share of requests without a client's trace that it takes; None: OTEL_TRACES_SAMPLER_ARG has it.
_SAMPLERS: Mapping[str, float | None] = {
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
    "parentbased_traceidratio": None,
}


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The address to which traces go, and of how many requests."""

    endpoint: str
    ratio: float = 1.0  #: The share of requests whose client has not decided.
    headers: Mapping[str, str] = {}
    resource: Mapping[str, str] = {}


def read(environ: Mapping[str, str]) -> TelemetrySettings | None:
    """None: no traces are wanted. Raises: ConfigurationError: names the variable."""
    general = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (general or endpoint):
        return None
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" if endpoint else "OTEL_EXPORTER_OTLP_ENDPOINT"
    url = endpoint or f"{general.rstrip('/')}/v1/traces"
    if not _is_http(url):
        raise ConfigurationError(f"{name}: {(endpoint or general)[:200]!r} is not an http:// or https:// URL")
    headers = _pairs(environ, "OTEL_EXPORTER_OTLP_HEADERS") | _pairs(environ, "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
    resource = _pairs(environ, "OTEL_RESOURCE_ATTRIBUTES")
    if environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = environ["OTEL_SERVICE_NAME"]
    return TelemetrySettings(endpoint=url, ratio=_ratio(environ), headers=headers, resource=resource)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that are not an address, or a port that is not one
        return False


def _ratio(environ: Mapping[str, str]) -> float:
    sampler = environ.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    if sampler not in _SAMPLERS:
        raise ConfigurationError(f"OTEL_TRACES_SAMPLER: {sampler[:80]!r} is not one of {', '.join(_SAMPLERS)}")
    fixed = _SAMPLERS[sampler]
    if fixed is not None:
        return fixed
    given = environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigurationError(f"OTEL_TRACES_SAMPLER_ARG: {given[:80]!r} is not a number from 0 to 1")
    return ratio


def _pairs(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """``key=value,key=value``, percent-encoded."""
    found = {}
    for pair in filter(None, environ.get(name, "").split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigurationError(f"{name}: {pair[:80]!r} is not key=value")
        found[key.strip()] = unquote(value.strip())
    return found
