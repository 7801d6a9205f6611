"""``omni up``: run a pipeline here, show how it starts, stop it on ^C.

Here: the order of things and signals. Not here: running processes (`processes.one_machine`), how it looks (`screens`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path

import click

from omnipipeline_spec.types.errors import SpecError
from stage_runtime import breakpoints
from stage_runtime.cli import options
from stage_runtime.cli.serving import curl, screens
from stage_runtime.errors import ConfigurationError, describe
from stage_runtime.processes import signals
from stage_runtime.processes.one_machine import admin, updating
from stage_runtime.processes.one_machine.launcher import Debug
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.processes.one_machine.preparing.prepared import STARTUP_S
from stage_runtime.processes.supervision.startup_failures import StartupFailed
from stage_runtime.settings import LOG_LEVELS


@click.command("up")
@options.pipeline_options
@click.option("--cpu", is_flag=True, help="Ignore GPU ids; run every stage on the CPU.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve HTTP at.")
@click.option("--port", type=click.IntRange(0, 65535), help="HTTP port; 0 is any free one. [default: the spec's]")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Clients must send the key in it as a bearer token. [default: the Secret that the spec names, if in its file]",
)
@click.option("--no-auth", is_flag=True, help="Require no API key, even if other machines can reach --host.")
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Serve HTTPS with the certificate in it (PEM, with its chain). Read again when it changes.",
)
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="The certificate's private key (PEM).")
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Let pages of this host call the API from browsers; may be repeated. [default: the spec's allowedHosts]",
)
@click.option(
    "--startup-timeout",
    type=click.FloatRange(min=1),
    default=STARTUP_S,
    show_default=True,
    metavar="SECONDS",
    help="Give up on a stage that does nothing for so long while it loads.",
)
@click.option(
    "--debug-values", is_flag=True, help="Log stages that write into tensors that they received or sent (slow)."
)
@click.option(
    "--debug", metavar="STAGE", help="Let breakpoint() in this stage stop at this terminal; prints plain lines."
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), help="Least of what is logged. [default: OMNI_LOG_LEVEL, info]"
)
@click.option("--watch", is_flag=True, help="Restart the groups whose part of FILE, or whose code beside it, changes.")
@click.option("--no-tty", is_flag=True, help="Plain lines instead of a live table.")
def command(
    file: str,
    overrides: tuple[str, ...],
    cpu: bool,
    host: str,
    port: int | None,
    api_key_file: Path | None,
    no_auth: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    allowed_hosts: tuple[str, ...],
    startup_timeout: float,
    debug_values: bool,
    debug: str | None,
    log_level: str | None,
    watch: bool,
    no_tty: bool,
) -> None:
    """Run a pipeline on this machine: the coordinator, and every process group as processes of its own.

    ^C lets requests finish and stops everything; a second ^C stops at once.
    """
    options.need("zmq", "uvloop", "uvicorn", "fastapi")  # of the extra `runtime`, in the processes that are started
    if math.isnan(startup_timeout):
        raise click.BadParameter("nan is not a number of seconds", param_hint="--startup-timeout")
    if no_auth and api_key_file is not None:
        raise click.UsageError("--no-auth and --api-key-file exclude each other: give one")
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both")
    watched = updating.file_of(file) if watch else None
    if watch and watched is None:
        raise click.UsageError(f"--watch needs a file, not the module {file}")
    if allowed_hosts:
        overrides = (*overrides, f"coordinator.http.allowedHosts={json.dumps(allowed_hosts)}")
    if debug is not None:
        if sys.stdin is None or sys.stdout is None:
            raise click.UsageError("--debug needs a standard input and output: they are closed")
        overrides = (f"coordinator.http.requestTimeoutSeconds={breakpoints.PATIENCE_S}", *overrides)
    local_options = LocalOptions(
        cpu=cpu,
        host=host,
        port=port,
        startup_s=startup_timeout,
        debug_values=debug_values,
        log_level=log_level,
        certificate=None if tls_cert is None or tls_key is None else (tls_cert.absolute(), tls_key.absolute()),
        api_key_file=api_key_file,
        no_auth=no_auth,
        debug=None if debug is None else Debug(stage=debug, terminal=(os.dup(0), os.dup(1))),
    )
    with options.errors_as_messages(), screens.choose(plain=no_tty or debug is not None) as screen:
        code = asyncio.run(_up(file, overrides, local_options, screen, watched))
        screen.finish()
        if screen.broken is not None:
            raise screen.broken
        sys.exit(code)


async def _up(
    file: str, overrides: tuple[str, ...], local_options: LocalOptions, screen: screens.Screen, watched: Path | None
) -> int:
    """watched: the pipeline's file, whose changes are taken over."""
    pipeline = LocalPipeline(
        file, overrides=overrides, options=local_options, on_change=screen.changed, on_line=screen.printed
    )
    pipeline.check()
    screen.starting(pipeline.plan, pipeline.views)
    for notice in pipeline.notices:
        screen.note(notice)
    start = asyncio.create_task(pipeline.start())
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    screen.when_broken(lambda: loop.call_soon_threadsafe(_end, pipeline, screen, start, ending))
    signals.handle(lambda _: _end(pipeline, screen, start, ending), signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        await start
        answered = curl.line(
            pipeline.plan.coordinator, pipeline.url, folder=pipeline.folder, key_file=pipeline.key_file
        )
        screen.up(pipeline.url, answered)
        async with admin.AdminServer(pipeline):
            watching = None if watched is None else asyncio.create_task(_watch(pipeline, watched, screen))
            await ending.wait()
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await pipeline.stop()
    except StartupFailed as failure:
        screen.failed(failure)
        return options.EXIT_FAULT
    except asyncio.CancelledError:
        screen.over()
        return options.EXIT_INTERRUPTED
    finally:
        await pipeline.abandon()
    screen.over()
    return 0


async def _watch(pipeline: LocalPipeline, file: Path, screen: screens.Screen) -> None:
    """Take over each change of the file and the code beside it. One that is wrong is shown, and changes nothing."""
    known = updating.state(file)
    while True:
        found = await updating.changed(file, known)
        changed, known = updating.differing(known, found), found
        before = pipeline.notices
        try:
            screen.note(f"{file.name}: {await pipeline.update(changed)}")
            for notice in pipeline.notices:
                if notice not in before:
                    screen.note(notice)
        except (SpecError, ConfigurationError, StartupFailed) as error:
            screen.note(f"{file.name}: what ran goes on: {error}")
        except Exception as error:  # the outermost loop: a full disk, for one; the next change may be taken over
            screen.note(f"{file.name}: what ran goes on: {describe(error)}")


def _end(pipeline: LocalPipeline, screen: screens.Screen, start: asyncio.Task[None], ending: asyncio.Event) -> None:
    """The first ^C drains, or gives up starting; the second cuts the drain short."""
    if not start.done():
        if not start.cancelling():  # its processes are killed then; what is left is to tidy up
            start.cancel()
        return
    if ending.is_set():
        pipeline.ask_to_stop()
        return
    screen.draining()
    ending.set()
