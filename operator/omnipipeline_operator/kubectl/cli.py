"""``kubectl omni``: the commands.

Here: options, exit codes, printing. Not here: what the commands do (the modules beside it). The entry point is
``kubectl-omni``: kubectl finds a plugin by that name on the PATH.
"""

from __future__ import annotations

import secrets
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from omnipipeline_operator.desired import children, naming
from omnipipeline_operator.errors import NotAllowed
from omnipipeline_operator.kinds import Manifest
from omnipipeline_operator.kubectl import acting, admin_routes, offline, page, picture, profiles, tree
from omnipipeline_operator.kubectl import history as past
from omnipipeline_operator.kubectl.access import RESOURCE, Kubectl, KubectlError
from omnipipeline_spec import consoles, operations, terminal
from omnipipeline_spec.generating import writing
from omnipipeline_spec.types.errors import InvalidPipeline, SpecError
from omnipipeline_spec.types.pods import COORDINATOR

Function = TypeVar("Function", bound=Callable[..., Any])

WHOLE_LINES: Final = 10_000  # columns


def file_options(function: Function) -> Function:
    """``-f FILE`` and ``--set path=value``."""
    chosen = click.option("overrides", "--set", multiple=True, metavar="PATH=VALUE", help="Change a value of the spec.")
    file = click.option("file", "-f", "--filename", required=True, metavar="FILE", help="A pipeline's YAML or Python.")
    return file(chosen(function))


def _flags() -> list[click.Parameter]:
    """kubectl's flags, which stand anywhere on its command lines; the later one of two wins."""
    chosen = [
        (("-n", "--namespace"), "Namespace; unset is kubectl's own."),
        (("--context",), "Context of the kubeconfig."),
        (("--kubeconfig",), "The kubeconfig's path."),
    ]
    return [click.Option(names, help=text, expose_value=False, callback=_chosen) for names, text in chosen]


def _chosen(context: click.Context, flag: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.obj = msgspec.structs.replace(context.obj or Kubectl(), **{str(flag.name): value})


class _Command(click.Command):
    """A command that takes these flags after its name, too."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params += _flags()


class _Commands(click.Group):
    command_class = _Command


@click.group(cls=_Commands, params=_flags(), context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Pipelines on Kubernetes: their status and why, the plan of a file, restart, drain, history."""
    terminal.accept_any_text()
    context.obj = context.obj or Kubectl()


@main.command()
@click.argument("name")
@click.pass_obj
def status(kubectl: Kubectl, name: str) -> None:
    """A pipeline as a tree: conditions, units, pods, and why something is not ready. Exit code 1: not Ready."""
    with errors_as_messages():
        pipeline = kubectl.pipeline(name)
        pods = kubectl.listed("pods", naming.selector(name))
    _console().print(tree.tree(pipeline, pods, _stages(pipeline)))
    conditions = pipeline.get("status", {}).get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    sys.exit(0 if ready else 1)


@main.command()
@click.argument("name")
@click.option("--stage", help="Pods that run this stage; unset is all pods.")
@click.option("-f", "--follow", is_flag=True, help="Stream new lines.")
@click.option("--previous", is_flag=True, help="Of the container before its last restart.")
@click.option("--tail", type=int, default=100, show_default=True, help="Lines of each pod; -1 is all.")
@click.option("--since", help="Such as 10m.")
@click.pass_obj
def logs(
    kubectl: Kubectl, name: str, stage: str | None, follow: bool, previous: bool, tail: int, since: str | None
) -> None:
    """Logs of the pods that run a stage, of every replica, each line with its pod."""
    with errors_as_messages():
        unit = None if stage is None else _unit_of(kubectl.pipeline(name), stage)
        selector = ",".join(f"{label}={value}" for label, value in naming.selector(name, unit).items())
        arguments = ["logs", f"--selector={selector}", "--prefix", f"--tail={tail}", "--max-log-requests=50"]
        chosen = {"--follow": follow, "--previous": previous, f"--since={since}": since}
        code = kubectl.show(*arguments, *(flag for flag, given in chosen.items() if given))
    sys.exit(code)


@main.command()
@file_options
def plan(file: str, overrides: tuple[str, ...]) -> None:
    """The plan of a file: pods, processes, GPUs, edges. Needs no cluster."""
    with errors_as_messages():
        loaded, planned = offline.read(file, overrides)
    _console().print(picture.plan(planned, coordinators=children.coordinators(loaded.spec)))


@main.command()
@file_options
def validate(file: str, overrides: tuple[str, ...]) -> None:
    """Every fault of a file with its place. Needs no cluster. Exit code 1 when there is one."""
    with errors_as_messages():
        _, planned = offline.read(file, overrides)
    terminal.echo(f"{file}: {planned.pipeline} is valid (revision {planned.current.revision})")


@main.command()
@file_options
@click.option("--image", required=True, metavar="IMAGE", help="Stage image of a spec that names none.")
@click.option("--with-key", is_flag=True, help="Add the control plane's Secret with a fresh key: not for a repository.")
@click.pass_obj
def manifests(kubectl: Kubectl, file: str, overrides: tuple[str, ...], image: str, with_key: bool) -> None:
    """Every object that the operator would make of a file, as YAML, for review. Needs no cluster.

    The same file gives the same text. It runs without an operator with --with-key: pipe it into kubectl apply -f -.
    """
    with errors_as_messages():
        loaded, planned = offline.read(file, overrides)
        namespace = kubectl.namespace or str(loaded.metadata.get("namespace") or "default")
        key = secrets.token_bytes(32) if with_key else None
        made = offline.manifests(loaded, planned, namespace=namespace, image=image, key=key)
    terminal.document("".join(f"---\n{writing.to_yaml(each)}" for each in made))


@main.command()
@click.argument("name")
@click.option("--wait", is_flag=True, help="Until the new revision serves.")
@click.option("--timeout", default="30m", show_default=True, help="How long to wait.")
@click.pass_obj
def restart(kubectl: Kubectl, name: str, wait: bool, timeout: str) -> None:
    """Replace all pods of a pipeline, new before old: no request is lost."""
    with errors_as_messages():
        stamp = acting.restart(kubectl, name)
    terminal.echo(f"{name} restarts (restartedAt {stamp})")
    if wait:
        sys.exit(_wait_ready(kubectl, name, timeout))


@main.command("rotate-key")
@click.argument("name")
@click.option("--wait", is_flag=True, help="Until all pods have the new key; then the old ones' Secrets are deleted.")
@click.option("--timeout", default="30m", show_default=True, help="How long to wait.")
@click.pass_obj
def rotate_key(kubectl: Kubectl, name: str, wait: bool, timeout: str) -> None:
    """Replace all pods of a pipeline by pods with a new control key, new before old: no request is lost."""
    with errors_as_messages():
        stamp = acting.rotate_key(kubectl, name)
        terminal.echo(f"{name} gets a new control key, and restarts for it (restartedAt {stamp})")
        if not wait:
            return
        if code := _wait_ready(kubectl, name, timeout):
            sys.exit(code)
        for secret in acting.delete_old_keys(kubectl, name):
            terminal.echo(f"Secret {secret} is deleted")


@main.command()
@click.argument("name")
@click.argument("pods", nargs=-1)
@click.option("--stage", help="Pods that run this stage.")
@click.option("--node", help="Pods on this node.")
@click.option("--timeout", type=float, default=600, show_default=True, metavar="SECONDS", help="For all of them.")
@click.pass_obj
def drain(
    kubectl: Kubectl, name: str, pods: tuple[str, ...], stage: str | None, node: str | None, timeout: float
) -> None:
    """Let pods of a pipeline finish their requests and end; their replacements start at once.

    Name PODS, or a --stage, or a --node. Disruption budgets hold. Exit code 1: not within the timeout.
    """
    if not pods and stage is None and node is None:
        raise click.UsageError("name pods, or --stage, or --node")
    with errors_as_messages():
        units = None if stage is None else [_unit_of(kubectl.pipeline(name), stage)]
        pods_of_pipeline = kubectl.listed("pods", naming.selector(name))
        leaving = acting.chosen(pods_of_pipeline, names=pods, units=units, node=node)
        missing = set(pods) - {pod["metadata"]["name"] for pod in leaving}
        if missing:
            raise KubectlError(f"{name} has no such pod (any more): {', '.join(sorted(missing))}")
        done = acting.drain(kubectl, name, leaving, timeout_s=timeout, report=terminal.echo)
    if not done:
        terminal.echo(f"not drained within {timeout:g} s", err=True)
    sys.exit(0 if done else 1)


@main.command()
@click.argument("name")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="How long to record.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write the reports there.")
@click.option("--torch", is_flag=True, help="A trace of torch's operations, too.")
@click.option("--pod", metavar="POD", help="Which coordinator, when there are several.")
@click.option(
    "--api-key", envvar="OMNI_API_KEY", help="API key. Default: read from the Secret that the pipeline names."
)
@click.pass_obj
def profile(
    kubectl: Kubectl, name: str, seconds: float, out: Path | None, torch: bool, pod: str | None, api_key: str | None
) -> None:
    """Record where requests spend their time, and show it. Nothing is restarted.

    --out DIR gives also report.html, report.json, perfetto.json (for ui.perfetto.dev) and all files of all processes.
    """
    with errors_as_messages():
        with admin_routes.forwarded(kubectl, name, api_key, pod=pod, any_one=False) as admin:
            run = profiles.record(
                admin, seconds=seconds, torch=torch, report=lambda line: terminal.echo(line, err=True)
            )
            terminal.echo(admin.get(f"/profiles/{run}/report?format=table").decode().rstrip("\n"))
            if out is not None:
                for path in profiles.save(admin, run, out):
                    terminal.echo(str(path), err=True)


@main.command()
@click.argument("name")
@click.argument("stage")
@click.argument("operation")
@click.option("--arguments", metavar="JSON", default="{}", help="What the operation takes: a JSON object.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, operations.MAX_TIMEOUT_S, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds.",
)
@click.option(
    "--api-key", envvar="OMNI_API_KEY", help="API key. Default: read from the Secret that the pipeline names."
)
@click.pass_obj
def call(
    kubectl: Kubectl,
    name: str,
    stage: str,
    operation: str,
    arguments: str,
    timeout: float,
    api_key: str | None,
) -> None:
    """Have the engine of every instance of STAGE carry out an OPERATION that it offers, and show what each answers.

    The exit code is 1 if any of them failed.
    """
    try:
        body = operations.body(stage, operation, operations.arguments(arguments), timeout_s=timeout)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arguments") from None
    with errors_as_messages(), admin_routes.forwarded(kubectl, name, api_key, pod=None, any_one=True) as admin:
        answer = admin.post(operations.ROUTE, body, timeout_s=timeout + operations.ANSWER_S)
        try:
            lines = list(operations.lines(answer))
        except (LookupError, TypeError):
            raise KubectlError("the coordinator's answer has no results: is it of another version?") from None
    for line in lines:
        terminal.echo(line.text, err=line.failed)
    sys.exit(1 if any(line.failed for line in lines) else 0)


@main.command()
@click.argument("name")
@click.option("--pod", metavar="POD", help="Which coordinator, when there are several: each shows its own requests.")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
@click.option(
    "--api-key", envvar="OMNI_API_KEY", help="API key. Default: read from the Secret that the pipeline names."
)
@click.pass_obj
def ui(kubectl: Kubectl, name: str, pod: str | None, no_browser: bool, api_key: str | None) -> None:
    """Open the page of a pipeline: its graph live, instances, requests, a place to try it, profiles. Ctrl+C ends it."""
    with errors_as_messages(), admin_routes.forwarded(kubectl, name, api_key, pod=pod, any_one=pod is None) as admin:
        page.show(admin, browse=None if no_browser else webbrowser.open, wait=time.sleep, report=terminal.echo)


@main.command()
@click.argument("name")
@click.option("--revision", "number", type=int, metavar="NUMBER", help="Print the whole spec of this entry.")
@click.pass_obj
def history(kubectl: Kubectl, name: str, number: int | None) -> None:
    """The revisions of a pipeline that have served, oldest first, and what changed in each.

    The newest ones, up to rollout.revisionHistoryLimit.
    """
    with errors_as_messages():
        found = past.entries(kubectl, name)
        if number is not None:
            terminal.document(writing.to_yaml(past.chosen(found, number).spec))
            return
    table = Table(box=None, pad_edge=False)
    for column in ("NUMBER", "REVISION", "CREATED", "CHANGED"):
        table.add_column(column)
    for one in found:
        marked = f"{one.number} (current)" if one.current else str(one.number)
        table.add_row(marked, one.revision, one.created, ", ".join(one.changed) or "-")
    _console().print(table)


@main.command()
@click.argument("name")
@click.option("--to-revision", "number", type=int, metavar="NUMBER", help="An entry of the history; unset is the last.")
@click.option("--wait", is_flag=True, help="Until it serves.")
@click.option("--timeout", default="30m", show_default=True, help="How long to wait.")
@click.pass_obj
def undo(kubectl: Kubectl, name: str, number: int | None, wait: bool, timeout: str) -> None:
    """Give a pipeline the spec of an earlier revision that has served; no request is lost.

    Fields that were scaled, suspended or paused since then stay so. A file that is applied again wins over it.
    """
    with errors_as_messages():
        entry = past.chosen(past.entries(kubectl, name), number)
        past.undo(kubectl, name, entry)
    terminal.echo(f"{name} goes back to {entry.number} (revision {entry.revision})")
    if wait:
        sys.exit(_wait_ready(kubectl, name, timeout))


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Errors of the user or of kubectl end the command with their message, without a traceback."""
    try:
        yield
    except InvalidPipeline as invalid:
        console = consoles.console(stderr=True, soft_wrap=True)
        for fault in invalid.faults:
            console.print(picture.fault(fault, invalid.source or "the pipeline"))
        sys.exit(1)
    except (SpecError, NotAllowed, KubectlError) as error:
        terminal.echo(f"error: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        raise  # click ends without a word when nobody reads on
    except OSError as error:  # no temporary folder, a full disk
        terminal.echo(f"error: {error}", err=True)
        sys.exit(1)
    except RecursionError:  # the API server takes 10,000 levels; the operator refuses them with their place
        terminal.echo("error: the resource nests too deep for this command: see kubectl get", err=True)
        sys.exit(1)


def _wait_ready(kubectl: Kubectl, name: str, timeout: str) -> int:
    """The exit code of kubectl wait."""
    return kubectl.show("wait", "--for=condition=Ready", f"{RESOURCE}/{name}", f"--timeout={timeout}")


def _console() -> Console:
    """Lines wrap in a terminal; in a pipe they stay whole, where rich would cut them at 80 columns."""
    return consoles.console(width_elsewhere=WHOLE_LINES)


def _stages(pipeline: Manifest) -> dict[str, tuple[str, ...]]:
    """unit -> stages; empty for an invalid spec: its conditions report the faults."""
    try:
        return offline.stages_of(offline.of_resource(pipeline))
    except SpecError:
        return {}


def _unit_of(pipeline: Manifest, stage: str) -> str:
    """The unit whose pods run ``stage``."""
    stages = offline.stages_of(offline.of_resource(pipeline))
    for unit, members in stages.items():
        if stage in members:
            return unit
    if stage == COORDINATOR:
        return stage
    known = ", ".join(member for members in stages.values() for member in members)
    raise KubectlError(f"{pipeline['metadata']['name']} has no stage {stage!r}; it has {known} (and coordinator)")


if __name__ == "__main__":
    main(prog_name="kubectl omni")
