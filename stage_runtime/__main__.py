"""``python -m stage_runtime ROLE``: the way every process of a pipeline is started.

Here: choosing the role, reading its settings, the exit code of a process that must not start. Not here: what a role
does (`processes`), the commands of people (`cli`; every other first argument is handed to it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from omnipipeline_spec.types import pods
from stage_runtime import diagnostics, errors, imports, settings
from stage_runtime.engines.threads import ending
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.containers import termination
from stage_runtime.processes.starting import codefiles
from stage_runtime.processes.supervision import statuspipe

EXIT_FAILED = 1  # in a factory or the configuration; reported, so starting again would not help


def main() -> int:
    """Run the role that the command line names."""
    diagnostics.enable()  # a supervisor sends SIGABRT to a loader that hangs: its stacks are the explanation
    match sys.argv[1:]:
        case ["stage", *_]:  # what follows is a name for people who look at a list of processes
            return _guarded(_stage)
        case [pods.COORDINATOR, *_]:
            return _guarded(lambda: _explained(_coordinator))
        case ["supervisor", *_]:
            return _guarded(lambda: _explained(_supervisor))
        case ["imports", answers]:
            from stage_runtime.processes.one_machine.preparing import importing

            return importing.answer(answers)
        case _:
            from stage_runtime import cli

            cli.main(prog_name="python -m stage_runtime")
            return 0


def _guarded(role: Callable[[], int]) -> int:
    ending.prepare()
    code = _reported(role)
    ending.exit_soon(code)
    return code


def _reported(role: Callable[[], int]) -> int:
    descriptor = os.environ.get("OMNI_STATUS_FD", "")  # a role hides it from the author's code
    status_fd = int(descriptor) if descriptor.isdecimal() else None
    try:
        return role()
    except ConfigurationError as error:
        if status_fd is None:  # or our supervisor shows that line
            diagnostics.write_line(f"cannot start: {error}")
        statuspipe.report(status_fd, statuspipe.failed(error))
        return EXIT_FAILED
    except BaseException as error:  # of the author's: a module that a hook is named in may do anything when imported
        statuspipe.report(status_fd, statuspipe.failed(error))
        diagnostics.write_line(errors.format_traceback(error))
        return EXIT_FAILED


def _explained(role: Callable[[], int]) -> int:
    """Runs a role as PID 1 of a container: an error goes into the termination message, which the kubelet reads."""
    return termination.explained(role, settings.termination_log(os.environ))


def _stage() -> int:
    loaded = settings.stage(os.environ)
    settings.prepare(os.environ, loaded)
    codefiles.put_on_path(loaded.plan.code, loaded.code_dir)
    with imports.uncollected():
        from stage_runtime.processes.stages import stage_process  # after the environment is set: it may import torch
    imports.freeze()  # no code of authors has run yet: these modules live as long as the process

    return stage_process.run(loaded)


def _coordinator() -> int:
    loaded = settings.coordinator(os.environ)
    settings.prepare(os.environ, loaded)
    codefiles.put_on_path(loaded.plan.code, loaded.code_dir)
    with imports.uncollected():
        from stage_runtime.processes import coordinator_process

    return coordinator_process.run(loaded)


def _supervisor() -> int:
    loaded = settings.supervisor(os.environ)
    from stage_runtime.processes.containers import pod

    return pod.run(loaded)


if __name__ == "__main__":
    sys.exit(main())
