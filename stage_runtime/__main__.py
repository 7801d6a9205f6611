"""``python -m stage_runtime ROLE``: the way every process of a pipeline is started.

Here: choosing the role, reading its settings, the exit code of a process that must not start. Not here: what a role
does (`processes`), the commands of people (`cli`; every other first argument is handed to it).
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable

from stage_runtime import settings
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes import codefiles, statuspipe

EXIT_FAILED = 1  # in a factory or the configuration; reported, so starting again would not help


def main() -> int:
    """Run the role that the command line names."""
    faulthandler.enable()  # a supervisor sends SIGABRT to a loader that hangs: its stacks are the explanation
    match sys.argv[1:]:
        case ["stage", *_]:  # what follows is a name for people who look at a list of processes
            return _guarded(_stage)
        case ["coordinator", *_]:
            return _guarded(_coordinator)
        case ["supervisor", *_]:
            return _guarded(_supervisor)
        case _:
            from stage_runtime import cli

            cli.main(prog_name="python -m stage_runtime")
            return 0


def _guarded(role: Callable[[], int]) -> int:
    try:
        return role()
    except ConfigurationError as error:
        fd = os.environ.get("OMNI_STATUS_FD", "")
        statuspipe.report(int(fd) if fd.isdecimal() else None, statuspipe.failed(error))
        print(f"cannot start: {error}", file=sys.stderr)
        return EXIT_FAILED


def _stage() -> int:
    told = settings.stage(os.environ)
    settings.prepare(os.environ, told)
    codefiles.put_on_path(told.plan.code, told.code_dir)
    from stage_runtime.processes import stage  # after the environment stands: it may import torch

    return stage.run(told)


def _coordinator() -> int:
    told = settings.coordinator(os.environ)
    settings.prepare(os.environ, told)
    codefiles.put_on_path(told.plan.code, told.code_dir)
    from stage_runtime.processes import coordinator

    return coordinator.run(told)


def _supervisor() -> int:
    told = settings.supervisor(os.environ)
    from stage_runtime.processes import pod

    return pod.run(told)


if __name__ == "__main__":
    sys.exit(main())
