"""The operator of a release that serves a second version of the resource: `tests.contract.next_version`."""

from __future__ import annotations

import os
import socket
import sys

import uvloop

from omnipipeline_operator import cli, settings
from tests.contract.next_version import VERSIONS


def main() -> int:
    cli.configure_logging("text")
    return uvloop.run(cli.serve(settings.read(os.environ, hostname=socket.gethostname()), versions=VERSIONS))


if __name__ == "__main__":
    sys.exit(main())
