"""Every field is read by somebody, or named as one that is not; the type checker says who reads what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from omnipipeline_operator.desired import children
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_spec import cluster, planning
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.plan import CoordinatorPlan, GroupPlan, RelayPlan, StagePlan, UnitPlan
from omnipipeline_spec.types.values import extra_of, fields_of, is_list, without_none
from stage_runtime.processes.one_machine.preparing.unsupported import NOT_IN_THIS_VERSION
from tests.docs.field_reads import reads
from tests.docs.test_tables import named, table

pytestmark = pytest.mark.timeout(600)  # ten seconds of type checking on a quiet machine

#: Rooms that look at fields and carry none of them out: they judge, print and draw.
ONLY_LOOK = (
    *(
        f"crds/omnipipeline_spec/validation/{room}.py"
        for room in ("graph", "placement", "nearness", "deployment", "transports", "variables")
    ),
    "stage_runtime/cli/",
    "stage_runtime/processes/one_machine/preparing/unsupported.py",
    "operator/omnipipeline_operator/kubectl/",
)
#: Derived, not configured: for people who read a plan, and for the planner's map of stages to groups.
DERIVED = {"GroupPlan.unit", "StagePlan.group"}
#: Types whose values go to Kubernetes as they are: `test_every_word_of_kubernetes_reaches_an_object`.
KUBERNETES = (
    *(cluster.KeyReference, cluster.FieldReference, cluster.ResourceReference, cluster.EnvSource, cluster.EnvVar),
    *(cluster.EnvReference, cluster.EnvFrom, cluster.LocalReference, cluster.Toleration, cluster.Placement),
    *(cluster.Rdma, cluster.Tls, cluster.Tracing, cluster.EmptyDir, cluster.ProfilingStorage),
    cluster.GpuClaim,
)


def acting(kind: str, field: str, *, outside: str = "") -> list[str]:
    """Files that read a field to carry it out."""
    return [file for file in reads().get((kind, field), ()) if not file.startswith((*ONLY_LOOK, outside or "-"))]


def test_reads_are_distinguished_by_the_type_they_are_of() -> None:
    """`Context.device` and others are read in many places; a plan's ``device`` is another thing."""
    assert acting("RelayPlan", "credits", outside="crds/") == ["stage_runtime/stage/outputs/edges.py"]
    assert ("RelayPlan", "no_such_field") not in reads()
    assert "stage_runtime/settings.py" in acting("UnitPlan", "env_defaults")


@pytest.mark.proves("unread-field")
def test_fields_of_a_plan_that_no_program_reads_are_in_the_table() -> None:
    kinds = (UnitPlan, GroupPlan, StagePlan, RelayPlan, CoordinatorPlan)
    unread = {
        f"{kind.__name__}.{field}"
        for kind in kinds
        for field in kind.__struct_fields__
        if not acting(kind.__name__, field, outside="crds/")
    }
    assert unread - DERIVED == {name for row in table("unread", "docs/decisions.md") for name in named(row[1])}


def test_the_commands_name_what_the_table_names() -> None:
    """`omni plan` and `omni up` say it of a file that sets one of them; the table says it of all."""
    assert {field for row in table("unread", "docs/decisions.md") for field in named(row[0])} == set(
        NOT_IN_THIS_VERSION
    )


def specs() -> Iterator[tuple[str, str, str]]:
    """(class, field, path) of all that a spec can hold, but what goes to Kubernetes as it is."""
    yield from _specs(PipelineConfig, "")


def _specs(kind: type[msgspec.Struct], path: str) -> Iterator[tuple[str, str, str]]:
    if kind in KUBERNETES:
        return
    for field in fields_of(kind):
        place = f"{path}.{field.encode_name}" if path else field.encode_name
        yield kind.__name__, field.name, place
        inner = without_none(field.type)
        if is_list(inner):
            inner, place = without_none(inner.item_type), f"{place}[]"  # type: ignore[attr-defined]
        if isinstance(inner, inspect.StructType):
            yield from _specs(inner.cls, place)


def said_to_be_unread(path: str) -> bool:
    return any(path == prefix or path.startswith((f"{prefix}.", f"{prefix}[")) for prefix in NOT_IN_THIS_VERSION)


@pytest.mark.proves("unread-field")
def test_every_field_of_a_spec_has_an_effect_or_is_listed_without_one() -> None:
    unread = {path for kind, field, path in specs() if not acting(kind, field)}
    assert {path for path in unread if not said_to_be_unread(path)} == set()


# ------------------------------------------------------------ words of Kubernetes


#: Pattern -> what stands around the mark.
FORMS = {
    quantities.FIELD_PATTERN: ("metadata.labels['mark", "']"),
    quantities.AMOUNT_FIELD_PATTERN: ("limits.hugepages-mark", ""),
    quantities.DEVICE_PATTERN: ("example.com/mark", ""),
}


class Sample:
    """Documents in which every string is one of its own, so that each can be looked for."""

    def __init__(self) -> None:
        self.marks: dict[str, str] = {}  #: Path -> the text that stands there.
        self.kinds: set[type[msgspec.Struct]] = set()

    def of(self, kind: type[msgspec.Struct], path: str, **given: Any) -> dict[str, Any]:
        self.kinds.add(kind)
        fields = [field for field in fields_of(kind) if field.encode_name not in given]
        return {field.encode_name: self.value(field.type, f"{path}.{field.encode_name}") for field in fields} | given

    def value(self, kind: inspect.Type, path: str) -> Any:
        plain = without_none(kind)
        if isinstance(plain, inspect.DictType):
            return {self.mark(f"{path}.key", "key"): self.value(plain.value_type, f"{path}.value")}
        if path.endswith(".divisor"):
            return "1"
        if "quantity" in extra_of(kind):
            return self.mark(path, "", first=1000)
        if is_list(plain):
            return [self.value(plain.item_type, f"{path}[]")]  # type: ignore[attr-defined]
        match plain:
            case inspect.StructType():
                return self.of(plain.cls, path)
            case inspect.StrType(pattern="^v1$"):
                return "v1"
            case inspect.StrType(pattern=pattern):
                return self.mark(path, *FORMS.get(pattern or "", ("mark", "")))
            case inspect.AnyType():
                return self.mark(path, "mark")
            case inspect.IntType():
                return 1
            case inspect.BoolType():
                return True
            case inspect.LiteralType():
                return plain.values[0]
        raise TypeError(f"{path} is of {plain}")

    def mark(self, path: str, text: str, end: str = "", *, first: int = 100) -> str:
        self.marks[path] = f"{text}{first + len(self.marks)}{end}"
        return self.marks[path]


def document(sample: Sample, where: str) -> dict[str, Any]:
    """A spec that says all that goes to a pod of a unit, or of the coordinator."""
    sources = sample.of(cluster.EnvVar, "env")["valueFrom"]  # a variable has one source
    prefix, *references = sample.of(cluster.EnvFrom, "envFrom").items()
    near: dict[str, Any] = {"near": ["b"]} | ({} if where == "unit" else {"gpuProducts": []})  # it has no GPU
    tolerated = sample.of(cluster.Toleration, "tolerations[]", operator="Equal", effect="NoExecute")
    requests = {"cpu": sample.mark("requests", "", first=1000)}
    limits = {"memory": sample.mark("limits", "", first=1000)}
    own = {
        "placement": sample.of(cluster.Placement, "placement", tolerations=[tolerated], **near),
        "resources": sample.of(cluster.Resources, "resources", requests=requests, limits=limits),
        "podTemplate": {"metadata": {"annotations": {"some-key": sample.mark("podTemplate", "mark")}}},
    }
    common = {
        "stages": [
            {"name": "a", "process": "a", "factory": "m:f", "next": ["b"], "gpu": [0]},
            {"name": "b", "process": "b", "factory": "m:f", "terminal": True},
        ],
        "env": [
            {"name": sample.marks["env.name"], "value": sample.marks["env.value"]},
            *({"name": f"V_{name}", "valueFrom": {name: held}} for name, held in sources.items()),
        ],
        "envFrom": [dict([prefix, reference]) for reference in references],
        "image": sample.mark("image", "mark"),
        "imagePullSecrets": [sample.of(cluster.LocalReference, "imagePullSecrets")],
        "serviceAccountName": sample.mark("serviceAccountName", "mark"),
        "observability": {"tracing": sample.of(cluster.Tracing, "tracing", sampleRatio=0.125)},
    }
    if where == "unit":
        storage = sample.of(cluster.ProfilingStorage, "storage", emptyDir=None)
        rdma = sample.of(cluster.Rdma, "rdma", count=3)
        claim = sample.of(cluster.GpuClaim, "gpuClaim")
        refined = {"processGroups": [{"name": "a", **own, "gpuClaim": claim}], "dataPlane": {"rdma": rdma}}
        return common | refined | {"profiling": {"storage": storage}}
    http = {
        "apiKeySecretRef": sample.of(cluster.KeyReference, "apiKeySecretRef"),
        "tls": sample.of(cluster.Tls, "tls"),
    }
    storage = {"emptyDir": sample.of(cluster.EmptyDir, "emptyDir")}
    return common | {"coordinator": {**own, "http": http}, "profiling": {"storage": storage}}


@pytest.mark.proves("unread-field")
@pytest.mark.parametrize("where", ["unit", "coordinator"])
def test_every_word_of_kubernetes_reaches_an_object(where: str) -> None:
    sample = Sample()
    spec = msgspec.convert(document(sample, where), PipelineConfig)
    facts = PodFacts(owner=Owner(namespace="space", name="demo", uid="u"), image="stage:1", control_secret="s")
    made = children.children(spec, planning.plan(spec, name="demo"), facts)
    workload = made.workloads[0 if where == "unit" else -1]
    rendered = msgspec.json.encode([workload.deployment["spec"]["template"], workload.devices]).decode()
    assert {path: mark for path, mark in sample.marks.items() if mark not in rendered} == {}
    assert '"0.125"' in rendered  # tracing.sampleRatio
    assert len(sample.marks) >= 34


def test_the_samples_hold_every_type_that_is_passed_on() -> None:
    sample = Sample()
    for where in ("unit", "coordinator"):
        document(sample, where)
    assert sample.kinds >= set(KUBERNETES)
