"""An operator of a later version, which would write every pod template and every Service in another way."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

from omnipipeline_operator import cli, settings
from omnipipeline_operator.cluster.token_bucket import TokenBucket
from omnipipeline_operator.desired import services
from omnipipeline_operator.desired.pod_templates import pods

SAID = "omnipipeline.dev/later"


def main() -> int:
    made, served = pods._deployment, services.http

    def deployment(*arguments: Any, **more: Any) -> Any:
        manifest = made(*arguments, **more)
        pod = manifest["spec"]["template"]
        pod["metadata"]["annotations"][SAID] = "yes"
        pod["spec"]["containers"][0]["env"].append({"name": "LATER", "value": "yes"})
        pod["spec"]["terminationGracePeriodSeconds"] += 1
        manifest["spec"]["revisionHistoryLimit"] = 7
        return manifest

    def service(*arguments: Any) -> Any:
        manifest = served(*arguments)
        manifest["metadata"].setdefault("annotations", {})[SAID] = "yes"
        return manifest

    pods._deployment, services.http = deployment, service  # type: ignore[assignment]
    cli.configure_logging("text")
    return asyncio.run(_serve())


async def _serve() -> int:
    return await cli.serve(settings.read(os.environ, hostname=socket.gethostname()), TokenBucket(rate=100, burst=100))


if __name__ == "__main__":
    sys.exit(main())
