"""The container that fetches a pipeline's model into its cache.

Here: its command, environment and mounts. Not here: the pod around it. Called by `storage` for a Job, by
`pods` for the model cache of a node, where it is an init container.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omnipipeline_operator.desired.pod_templates import volumes
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types import stores
from omnipipeline_spec.types.pods import PROBE_PORT

NAME: Final = "prefetch"  # of the container
FETCH: Final = """\
import contextlib, os, signal, sys, traceback
LOG = "/dev/termination-log"
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # PID 1 ignores what it does not handle; what came stays
for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # meant for the pods that come after
    os.environ.pop(offline, None)
from huggingface_hub import snapshot_download
from tqdm.auto import tqdm
class Lines(tqdm):  # a line for every ten per cent: a pod's log has no terminal, where a bar could grow
    shown, said = None, None  # the first bar of bytes; its last line
    def __init__(self, *args, **options):
        options.pop("name", None)
        if Lines.shown is None and options.get("unit") == "B":
            Lines.shown = self
        super().__init__(*args, **{**options, "disable": False})
    def display(self, *args, **options):
        line = f"{int(10 * self.n / self.total)}0 % of {self.format_sizeof(self.total)}B" if self.total else None
        if Lines.shown is self and line not in (None, Lines.said):
            Lines.said = line
            print("fetched", line, flush=True)
def report():
    return (int(Lines.shown.n), int(Lines.shown.total or 0)) if Lines.shown else (0, 0)
try:
    from stage_runtime.processes.containers.fetching import serving
except ImportError:  # the image has an earlier version
    serving = lambda *_: contextlib.nullcontext()
path, revision = os.environ["OMNI_MODEL_PATH"], os.environ.get("OMNI_MODEL_REVISION") or None
try:
    with serving(report, os.environ):
        print("fetched to", snapshot_download(path, revision=revision, tqdm_class=Lines))
except Exception as error:
    traceback.print_exc()
    cause = f"cannot fetch {path}: {type(error).__name__}: {' '.join(str(error).split())}"
    if os.path.exists(LOG):  # the contract's `crashes` has its form
        with open(LOG, "w", errors="replace") as log:
            log.write(f"{cause[:500]}\\n---\\n{traceback.format_exc()[-1000:]}")
    sys.exit(cause)
"""


def container(
    like: Mapping[str, Any],
    model_path: str,
    model_revision: str | None,
    *,
    secret: str | None,
    resources: Manifest,
    options: Sequence[str] = (),
) -> Manifest:
    """The container.

    like:   the container whose image, variables and rights it has; not those variables that are ours.
    secret: its keys are variables of this container alone.
    options: of `omni prefetch`, for a model of an object store.
    """
    is_stored = stores.is_address(model_path)
    place = {"name": "OMNI_MODELS_DIR", "value": volumes.MODELS_DIR} if is_stored else None
    model = [
        place or {"name": "HF_HOME", "value": volumes.HUB_DIR},
        {"name": "OMNI_MODEL_PATH", "value": model_path},
        {"name": "OMNI_MODEL_REVISION", "value": model_revision or ""},
        {"name": "OMNI_PROGRESS_PORT", "value": str(PROBE_PORT)},
    ]
    made = {key: like[key] for key in ("image", "imagePullPolicy", "envFrom", "securityContext") if key in like}
    made |= {
        "name": NAME,
        "command": ["python3", "-m", "stage_runtime", "prefetch", *options] if is_stored else ["python3", "-c", FETCH],
        "env": [*(each for each in like["env"] if not _is_ours(each["name"], model)), *model],
        "resources": resources,
        "volumeMounts": [
            volumes.mount("tmp", "/tmp", read_only=False),
            volumes.mount("models", volumes.MODELS_DIR, read_only=False),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if secret:
        made["envFrom"] = [*made.get("envFrom", ()), {"secretRef": {"name": secret}}]
    return made


def _is_ours(name: str, model: Sequence[Manifest]) -> bool:
    return name.startswith("OMNI_") or any(each["name"] == name for each in model)
