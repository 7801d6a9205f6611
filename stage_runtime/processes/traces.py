"""The exporter of traces, if OpenTelemetry asks for it. Called by `coordinator_process` and `stage_process`."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os

from stage_runtime.errors import ConfigurationError
from stage_runtime.telemetry import settings as telemetry
from stage_runtime.telemetry.exporting import Exporter
from stage_runtime.telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)


def exporter(
    pipeline: str, incarnation: str, stack: contextlib.AsyncExitStack
) -> tuple[Exporter, TelemetrySettings] | None:
    """None: no variable asks for traces. Raises: ConfigurationError: they cannot be sent."""
    settings = telemetry.read(os.environ)
    if settings is None:
        return None
    if not _installed("opentelemetry.proto.collector"):
        raise ConfigurationError("install the extra `otel` (pip install 'omnipipeline[otel]')")
    made = Exporter(settings, {"service.name": pipeline, "service.instance.id": incarnation})
    stack.callback(made.close)
    return made, settings


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even a parent of it
        return False
