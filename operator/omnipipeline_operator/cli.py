"""``python -m omnipipeline_operator [withdraw-conversion]``: settings, logging, signals, the exit code.

Here: only that. Called by `__main__`; tests call `serve` with a write limiter of their own. The command is the chart's
hook, which takes the conversion webhook out of the CRD before the release that answers it goes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import uvloop

from omnipipeline_operator import settings
from omnipipeline_operator.cluster.client import Client, WriteLimiter
from omnipipeline_operator.cluster.lease import LeaseLost
from omnipipeline_operator.cluster.token_bucket import TokenBucket
from omnipipeline_operator.errors import ConfigurationError, OperatorError
from omnipipeline_operator.handlers import free_memory, lifecycle, watching
from omnipipeline_operator.handlers.lifecycle import WatchesChanged
from omnipipeline_operator.settings import Settings
from omnipipeline_spec.conversion import versions as released
from omnipipeline_spec.conversion.versions import Versions

log = logging.getLogger(__name__)

WITHDRAW = "withdraw-conversion"
#: The API server takes objects of 10,000 levels. Python's own limit, 1000, would end every list and watch that has one;
#: the planner refuses it with its place. A decoder in C overflows a stack of 8 MiB from 20,000 levels on and ends the
#: process: a client of the webhook could send them.
MOST_CALLS: Final = 12_000


def main(arguments: Sequence[str] = ()) -> int:
    """Run until SIGTERM; exit code 0 then, 1 after an error."""
    if [*arguments] not in ([], [WITHDRAW]):
        print(f"expected no argument or {WITHDRAW}, got: {' '.join(arguments)}", file=sys.stderr)
        return 2
    try:
        configuration = settings.read(os.environ, hostname=socket.gethostname())
    except ConfigurationError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1
    configure_logging(configuration.log_format)
    if arguments:
        return uvloop.run(withdraw(configuration))
    free_memory.bound()
    sys.setrecursionlimit(MOST_CALLS)
    return uvloop.run(serve(configuration))


async def serve(
    configuration: Settings, writes: WriteLimiter | None = None, versions: Versions = released.RELEASED
) -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    limiter = writes or TokenBucket(configuration.writes_per_s, configuration.write_burst)
    try:
        await lifecycle.run(configuration, limiter, versions)
    except* (LeaseLost, WatchesChanged) as ended:
        log.error("ending: %s", ended.exceptions[0])
        return_code = 1
    else:
        return_code = 0
    return return_code


async def withdraw(configuration: Settings) -> int:
    """Take the conversion webhook out of the CRD; the exit code."""
    if configuration.conversion is None:
        log.error("the conversion webhook is off: OMNI_OPERATOR_CONVERSION_PORT is not set")
        return 1
    from omnipipeline_operator.conversion import withdrawing  # 9 MiB of cryptography, mostly not needed

    try:
        limiter = TokenBucket(configuration.writes_per_s, configuration.write_burst)
        async with await Client.connect(limiter) as client:
            await withdrawing.withdraw(client, configuration.conversion)
    except OperatorError as error:
        log.error("%s", error)
        return 1
    return 0


def configure_logging(form: str) -> None:
    """One line per record, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handler.addFilter(watching.without_refusals)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it logs every handled event


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry)
