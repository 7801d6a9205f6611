"""A pipeline as it was read for this machine: its spec, its plan, and what its processes are given. Nothing runs yet.

Here: reading, references, keys, what is checked before the start, the environment. Not here: processes (`fleet`), the
life of a run (`local`). Called by `local`, for the start and for each changed file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from omnipipeline_spec import loading, planning
from omnipipeline_spec.loading import LoadedPipeline
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.validation import variables
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.launcher import Debug
from stage_runtime.processes.one_machine.preparing import author_folder, client_keys, preflight, references, unsupported
from stage_runtime.processes.starting import codefiles, launching, rundir

STARTUP_S = 300.0  # without progress; `omni up --startup-timeout` changes it


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run it here."""

    cpu: bool = False  #: GPU ids are ignored.
    host: str = "127.0.0.1"
    port: int | None = None  #: None: the spec's ``coordinator.http.port``; 0: any free one.
    startup_s: float = STARTUP_S
    debug_values: bool = False
    api_key_file: Path | None = None  #: Bearer token that clients must send; None: the Secret's of the spec, if any.
    certificate: tuple[Path, Path] | None = None  #: Files of a certificate and its key; None: plain HTTP is served.
    log_level: str | None = None  #: One of `settings.LOG_LEVELS`; None: the environment's.
    no_auth: bool = False  #: Require no key, even if others can reach ``host``.
    debug: Debug | None = None


class Prepared:
    """One version of a pipeline: as its file was when it was read."""

    def __init__(
        self,
        source: str | os.PathLike[str] | PipelineConfig,
        *,
        overrides: Sequence[str] = (),
        options: LocalOptions | None = None,
        environ: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        """source: a file that `loading` reads, or a spec. environ: instead of this process's own.
        name: the pipeline's, instead of the source's.

        Raises: SpecError, ConfigurationError.
        """
        self.options = options = options or LocalOptions()
        self._given = (source, tuple(overrides), environ)
        loaded, self.author_folder = read(source, overrides)
        self.given_name = loaded.name  #: The name that the source has.
        self.spec, self.plan = loaded.spec, planning.plan(loaded.spec, name=name or loaded.name)
        if options.cpu:
            self.plan = planning.without_gpus(self.plan)
        environ = os.environ if environ is None else environ
        found = references.resolve(
            self.spec, loaded.beside, environ, namespace=loaded.metadata.get("namespace") or None
        )
        taken = {name: why for name in found.environment if (why := variables.taken(name, self.spec))}
        vain = (f"envFrom: {name} is left out: it {why}" for name, why in taken.items())
        self._environ = {**environ, **{name: value for name, value in found.environment.items() if name not in taken}}
        self.shown_gpus = self._environ.get("CUDA_VISIBLE_DEVICES")
        self._code = found.code | self.plan.coordinator.code
        for unit in self.plan.units:
            self._code |= unit.code
        self.api_keys, unkeyed = client_keys.resolve(
            self.spec.coordinator.http.api_key_secret_ref,
            file=options.api_key_file,
            no_auth=options.no_auth,
            found=found.api_keys,
        )
        #: Fields of the spec without effect, one line each.
        self.notices = (
            *map(str, loaded.dropped),
            *unsupported.notices(self.spec, local=True),
            *found.notices,
            *vain,
            *unkeyed,
        )

    def again(self) -> Prepared:
        """The same source, read again. The pipeline keeps its name: coordinators take instances of their own alone.

        Raises: SpecError, ConfigurationError: the file is wrong, or asks for GPUs that are not there.
        """
        source, overrides, environ = self._given
        fresh = Prepared(source, overrides=overrides, options=self.options, environ=environ, name=self.plan.pipeline)
        preflight.check_gpus(fresh.plan, fresh.shown_gpus)
        return fresh

    def check(self, port: int) -> None:
        """Refuse what cannot run here, before a minute is spent on loading models. port: of HTTP.

        Raises: ConfigurationError: names what to change.
        """
        rundir.check_access(self.spec.endpoints.base_path)
        rundir.check_budget(self.spec.endpoints.base_path, preflight.socket_names(self.plan))
        if not self.api_keys and not self.options.no_auth and not preflight.is_loopback(self.options.host):
            raise ConfigurationError(
                f"--host {self.options.host} is reached from other machines, and no API key is set: name a file that "
                "holds one with --api-key-file, or allow everybody to use it with --no-auth"
            )
        if self.options.debug is not None:
            preflight.check_debugged(self.plan, self.options.debug.stage)
        if self.options.certificate is not None:
            preflight.check_certificate(*self.options.certificate)
        preflight.check_gpus(self.plan, self.shown_gpus)
        preflight.check_port(self.options.host, port)

    def environment(self, code_dir: Path) -> dict[str, str]:
        """The environment of all processes of the run; the inline files are written to ``code_dir``."""
        if self._code:
            codefiles.write(self._code, code_dir)
        path = (*([code_dir] if self._code else []), *([self.author_folder] if self.author_folder else []))
        environ = {**self._environ, **launching.tracing(self.spec.observability.tracing)}
        return launching.environment(environ, path=path, code_dir=code_dir if self._code else None)


def read(
    source: str | os.PathLike[str] | PipelineConfig, overrides: Sequence[str] = ()
) -> tuple[LoadedPipeline, Path | None]:
    """A sound spec, and the folder of its file, whose modules may be imported.

    Raises: SpecError: with all faults. ConfigurationError: a module there has a name that is taken.
    """
    if isinstance(source, PipelineConfig):
        name = planning.plan(source).pipeline
        return LoadedPipeline(name=name, spec=source, source="the spec", sources={}), None
    folder = author_folder.of(os.fspath(source))
    author_folder.check(folder)
    return loading.load(os.fspath(source), overrides=overrides), folder
