"""Pipelines written in Python: an instance is what it says, a class is what `config_cls` names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omnipipeline_spec import loading, planning
from omnipipeline_spec.generating import writing
from omnipipeline_spec.pipeline import PipelineConfig, RelayConfig, StageConfig
from omnipipeline_spec.types.errors import InvalidPipeline, UnreadableSpec
from omnipipeline_spec.types.values import to_document
from omnipipeline_spec.validation import topology
from tests.imported import forget_modules_of

BASE = "omnipipeline_spec.pipeline:PipelineConfig"
HEAD = "from omnipipeline_spec.pipeline import PipelineConfig, RelayConfig, StageConfig\n"
FAMILY = (
    HEAD
    + """
class Mine(PipelineConfig):
    name: str = "mine"
    model_path: str | None = "class/model"
    gpu_memory_limit: float = 0.5
    stages: tuple[StageConfig, ...] = (
        StageConfig(name="a", process="a", factory="w:m", gpu=0, next="b", factory_args={"k": 1, "j": 2}),
        StageConfig(name="b", process="b", factory="w:m", terminal=True),
    )
"""
)


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path) -> Iterator[None]:
    """Modules of one test's folder are not those of the next one's."""
    yield
    forget_modules_of(tmp_path)


def written(folder: Path, text: str, name: str = "family.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def document(spec: PipelineConfig) -> Any:
    """Everything the spec says, but which class said it."""
    return {key: value for key, value in to_document(spec).items() if key != "configCls"}


def test_an_instance_of_a_subclass_is_what_it_says(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        FAMILY
        + """
pipeline = Mine(
    model_path=None, gpu_memory_limit=0.95,
    stages=[StageConfig(name="a", process="a", factory="w:m", terminal=True, factory_args={"k": 5})],
)
""",
    )
    assert document(loading.load(file).spec) == {
        "name": "mine",
        "stages": [{"name": "a", "factory": "w:m", "process": "a", "terminal": True, "factoryArgs": {"k": 5}}],
    }


def test_what_an_instance_leaves_out_is_its_class_s(tmp_path: Path) -> None:
    file = written(tmp_path, FAMILY + "\npipeline = Mine()\n")
    loaded = loading.load(file)
    assert (loaded.name, loaded.spec.model_path, loaded.spec.gpu_memory_limit) == ("mine", "class/model", 0.5)
    assert loaded.spec.stage("a").factory_args == {"k": 1, "j": 2}
    assert loaded.spec.config_cls == "family:Mine"


class Family(PipelineConfig, frozen=True, kw_only=True):
    """A class whose defaults differ from `PipelineConfig`'s in every kind of field."""

    name: str = "family"
    model_path: str | None = "org/model"
    relay_backend: Any = "tcp"
    serves: tuple[Any, ...] = ("chat",)
    env_defaults: dict[str, str] = msgspec.field(default_factory=lambda: {"A": "1"})
    gpu_memory_limit: float = 0.5
    stages: tuple[StageConfig, ...] = (StageConfig(name="a", process="a", factory="w:m", terminal=True),)


class Quick(StageConfig, frozen=True, kw_only=True):
    """A stage whose defaults differ, too."""

    process: str = "quick"
    terminal: bool = True
    relay: RelayConfig | None = RelayConfig(credits=7)


PLAIN = PipelineConfig(
    name="family",
    model_path="org/model",
    relay_backend="tcp",
    serves=["chat"],
    env_defaults={"A": "1"},
    gpu_memory_limit=0.5,
    stages=[StageConfig(name="a", process="a", factory="w:m", terminal=True)],
)


def test_a_subclass_s_defaults_reach_plan_check_and_resource() -> None:
    assert planning.plan(Family()) == planning.plan(PLAIN)
    assert document(topology.check(Family())) == document(PLAIN)
    assert loading.loads(writing.convert(Family())).spec.env_defaults == {"A": "1"}
    assert json.loads(json.dumps(writing.resource(Family())))["spec"] == writing.resource(PLAIN)["spec"]


def test_a_stage_of_a_subclass_keeps_what_its_class_says() -> None:
    spec = PipelineConfig(name="p", stages=[Quick(name="a", factory="w:m")])
    assert document(topology.check(spec))["stages"] == [
        {"name": "a", "factory": "w:m", "process": "quick", "terminal": True, "relay": {"credits": 7}}
    ]


def test_a_field_that_a_class_adds_is_refused_and_never_dropped() -> None:
    class Adds(Family, frozen=True, kw_only=True):
        voice: str = "alba"

    for spec in (Adds(), Adds(voice="other")):
        with pytest.raises(InvalidPipeline, match="voice: unknown key"):
            planning.plan(spec)


def test_lists_and_maps_can_be_defaults_of_a_class_and_no_two_instances_share_them(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        HEAD
        + """
class Mine(PipelineConfig):
    env_defaults: dict[str, str] = {"A": "1"}
    stages: list[StageConfig] = [
        StageConfig(name="a", process="a", factory="w:m", factory_args={"k": 1}, terminal=True)
    ]

one, pipeline = Mine(), Mine()
one.stages[0].factory_args["k"] = 2
one.env_defaults["A"] = "2"
""",
    )
    spec = loading.load(f"{file}:pipeline").spec
    assert (spec.env_defaults, spec.stage("a").factory_args) == ({"A": "1"}, {"k": 1})


@pytest.mark.parametrize("line", ['model_path = "x"', "stages = ()", "name = property(lambda self: 'x')"])
def test_a_default_without_annotation_is_refused_with_the_cure(tmp_path: Path, line: str) -> None:
    file = written(tmp_path, HEAD + f"class Mine(PipelineConfig):\n    {line}\n")
    field = line.partition(" ")[0]
    with pytest.raises(UnreadableSpec, match=rf"Mine\.{field} needs an annotation: {field}: "):
        loading.load(file)


def test_annotations_may_be_text_in_a_file_that_is_loaded_by_its_path(tmp_path: Path) -> None:
    """Types are taken from the contract: a module that is in no ``sys.modules`` cannot be asked for names."""
    for name in ("family.py", "json.py"):
        file = written(tmp_path, "from __future__ import annotations\n" + FAMILY + "\npipeline = Mine()\n", name)
        assert loading.load(file).spec.gpu_memory_limit == 0.5
    assert sys.modules["json"] is json


def test_a_file_may_hold_dataclasses_of_its_own(tmp_path: Path) -> None:
    """They look for their module in ``sys.modules`` while it is loaded."""
    text = (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Own:\n    x: int = 1\n"
    )
    file = written(tmp_path, text + HEAD + FAMILY + "\npipeline = Mine(model_path=str(Own().x))\n")
    assert loading.load(file).spec.model_path == "1"
    assert "family" not in sys.modules


def test_a_name_made_of_the_model_path_follows_an_override(tmp_path: Path) -> None:
    stage = 'StageConfig(name="a", process="a", factory="w:m", terminal=True)'
    file = written(tmp_path, HEAD + f'pipeline = PipelineConfig(model_path="org/one", stages=[{stage}])\n')
    assert loading.load(file).name == "one"
    assert loading.load(file, overrides=["model_path=org/two"]).name == "two"


# ----------------------------------------------------------------- config_cls


def test_config_cls_is_module_and_class_whoever_makes_the_instance() -> None:
    assert PLAIN.config_cls == BASE
    assert Family().config_cls == f"{__name__}:Family"


def test_two_classes_of_one_name_are_two(tmp_path: Path) -> None:
    for module, limit in (("left", 0.25), ("right", 0.75)):
        written(tmp_path, FAMILY.replace("0.5", str(limit)), f"{module}.py")
    for module, limit in (("left", 0.25), ("right", 0.75)):
        file = written(tmp_path, f"config_cls: {module}:Mine\n", "p.yaml")
        assert loading.load(file).spec.gpu_memory_limit == limit


def test_a_class_stands_beside_the_file_that_names_it_whatever_else_has_its_module_s_name(tmp_path: Path) -> None:
    for folder, limit in ((tmp_path / "one", 0.25), (tmp_path / "two", 0.75)):
        folder.mkdir()
        written(folder, FAMILY.replace("0.5", str(limit)), "json.py")
        assert loading.load(written(folder, "config_cls: json:Mine\n", "p.yaml")).spec.gpu_memory_limit == limit
    assert sys.modules["json"] is json


def test_a_class_inside_a_package_beside_the_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    written(tmp_path / "models", FAMILY)
    written(
        tmp_path / "models", "from .family import Mine as Base\nclass Outer:\n    class Mine(Base): ...\n", "sub.py"
    )
    file = written(tmp_path, "config_cls: models.sub:Outer.Mine\n", "p.yaml")
    assert loading.load(file).spec.gpu_memory_limit == 0.5
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mine", "config_cls Mine: write it as package.module:Class; did you mean family:Mine"),
        ("PipelineConfig", f"write it as package.module:Class; did you mean {BASE}"),
        ("family:Mien", "config_cls family:Mien: family has no class Mien; did you mean family:Mine"),
        ("family:StageConfig", "config_cls family:StageConfig: StageConfig is not a subclass of PipelineConfig"),
        ("family:HEAD", "family has no class HEAD"),
        ("famly:Mine", "config_cls famly:Mine: no module named 'famly'; did you mean family"),
        ("broken:Mine", "config_cls broken:Mine: ZeroDivisionError"),
        ("needs:Mine", "config_cls needs:Mine: ModuleNotFoundError: No module named 'not_here'"),
        (":Mine", "write it as package.module:Class"),
        ("family:", "write it as package.module:Class"),
        ("../family:Mine", "write it as package.module:Class"),
        (7, "configCls: 7 must be a string"),
        (["a:B"], "configCls: must be a string, not a list"),
    ],
)
def test_a_class_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path, name: object, message: str) -> None:
    written(tmp_path, FAMILY)
    written(tmp_path, "1 / 0\n", "broken.py")
    written(tmp_path, "import not_here\n", "needs.py")
    file = written(tmp_path, f"config_cls: {json.dumps(name)}\nmodel_path: org/model\n", "p.yaml")
    with pytest.raises((UnreadableSpec, InvalidPipeline)) as raised:
        loading.load(file)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", [["a"], {"a": 1}, None, 7, True])
def test_a_name_over_a_class_that_is_not_a_text_is_refused_with_its_line(tmp_path: Path, name: object) -> None:
    written(tmp_path, FAMILY)
    stage = json.dumps({"name": name, "factory": "w:m", "process": "a", "terminal": True})
    file = written(tmp_path, f"config_cls: family:Mine\nstages:\n- {stage}\n", "p.yaml")
    with pytest.raises(InvalidPipeline, match=r"line 3: stages\[0\].name: .*(must be a string|is required)"):
        loading.load(file)


def test_a_text_imports_nothing_unless_a_folder_is_given(tmp_path: Path) -> None:
    written(tmp_path, FAMILY + "\nraise SystemExit('imported')\n")
    with pytest.raises(UnreadableSpec, match=r"config_cls family:Mine: .* from a file"):
        loading.loads("config_cls: family:Mine\n")


@pytest.mark.proves("python-class")
def test_a_resource_never_imports_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator reads resources of strangers: a class is a note in an annotation there, and no instruction."""
    written(tmp_path, FAMILY + "\nraise SystemExit('imported')\n", "hostile.py")
    monkeypatch.syspath_prepend(tmp_path)
    for note in ("hostile:Mine", "", 7, ["hostile:Mine"], None):
        resource = writing.resource(PLAIN)
        resource["metadata"]["annotations"] = {"omnipipeline.dev/config-cls": note}
        assert document(loading.from_resource(resource).spec) == document(PLAIN)
        in_spec = {**resource, "spec": {**resource["spec"], "configCls": note}}
        if note is not None:
            with pytest.raises(InvalidPipeline, match="configCls: is not a field of the resource"):
                loading.from_resource(in_spec)
        file = written(tmp_path, json.dumps(resource), "r.yaml")
        assert document(loading.load(file).spec) == document(PLAIN)
    assert "hostile" not in sys.modules


def test_the_resource_says_whose_class_it_was_made_of_and_needs_it_no_more(tmp_path: Path) -> None:
    file = written(tmp_path, FAMILY + "\npipeline = Mine(model_path=None)\n")
    loaded = loading.load(file)
    text = writing.to_yaml(writing.resource(loaded.spec, name=loaded.name, metadata=loaded.metadata))
    (tmp_path / "family.py").unlink()
    again = loading.loads(text)
    assert again.spec == loaded.spec
    assert again.spec.config_cls == "family:Mine"
    assert "omnipipeline.dev/config-cls: family:Mine" in text
    assert "annotations" not in writing.resource(PLAIN)["metadata"]
    assert writing.resource(again.spec, name=again.name, metadata=again.metadata) == writing.resource(
        loaded.spec, name=loaded.name
    )


def test_config_cls_cannot_be_set_from_the_command_line(tmp_path: Path) -> None:
    """It would come too late: the class's defaults lie below the file."""
    file = written(tmp_path, FAMILY + "\npipeline = Mine()\n")
    with pytest.raises(InvalidPipeline, match=r"config_cls: .* name the class in the file"):
        loading.load(file, overrides=["config_cls=family:Mine"])


def test_a_class_that_computes_its_defaults_does_so_for_a_file_too(tmp_path: Path) -> None:
    written(
        tmp_path,
        HEAD
        + """
import msgspec
class Computed(PipelineConfig):
    def __post_init__(self):
        if not self.stages:
            stages = (StageConfig(name="a", process="a", factory="w:m", terminal=True),)
            msgspec.structs.force_setattr(self, "stages", stages)
        super().__post_init__()
""",
    )
    spec = loading.load(written(tmp_path, "config_cls: family:Computed\n", "p.yaml")).spec
    assert [stage.name for stage in spec.stages] == ["a"]


def test_a_module_with_a_class_but_no_pipeline_says_how_to_make_one(tmp_path: Path) -> None:
    file = written(tmp_path, FAMILY)
    with pytest.raises(UnreadableSpec, match=r"has no PipelineConfig\(...\) at module level.*pipeline = Mine\("):
        loading.load(file)
    with pytest.raises(UnreadableSpec, match=r"Mine is not a PipelineConfig; it is a class.*Mine\("):
        loading.load(f"{file}:Mine")


def test_a_file_that_is_named_as_a_module_is_named_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, FAMILY, "own_family.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableSpec, match=r"^own_family:pipeline: no module named .*the file is own_family.py:pipe"):
        loading.load("own_family:pipeline")


# ----------------------------------------------------------------------- null


def stage(**fields: Any) -> StageConfig:
    return StageConfig(name="a", process="a", factory="w:m", terminal=True, **fields)


def planned_args(spec: PipelineConfig) -> Any:
    plan = planning.plan(spec, name="p")
    again = msgspec.json.decode(msgspec.json.encode(plan), type=type(plan))
    assert again == plan
    return plan.units[0].stages[0].factory_args


def test_none_in_python_is_a_value_and_an_override() -> None:
    nested = {"a": None, "b": [None, {"c": None}]}
    assert planned_args(PipelineConfig(stages=[stage(factory_args={"x": None, "y": nested})])) == {
        "x": None,
        "y": nested,
    }
    overridden = PipelineConfig(stages=[stage(factory_args={"x": 1})], runtime_overrides={"a": {"x": None}})
    assert planned_args(overridden) == {"x": None}


def test_none_in_python_survives_a_file_and_its_overrides(tmp_path: Path) -> None:
    arguments = 'name="a", process="a", factory="w:m", terminal=True, factory_args={"x": None, "y": 1}'
    text = f"pipeline = PipelineConfig(stages=[StageConfig({arguments})])\n"
    file = written(tmp_path, HEAD + text)
    assert planned_args(loading.load(file).spec) == {"x": None, "y": 1}
    assert planned_args(loading.load(file, overrides=["stages.a.factoryArgs.y=null"]).spec) == {"x": None}
    assert planned_args(loading.load(file, overrides=["stages.a.factoryArgs.x=null"]).spec) == {"y": 1}


def test_none_that_a_resource_cannot_hold_is_refused_with_its_path() -> None:
    spec = PipelineConfig(
        name="p", stages=[stage(factory_args={"x": None, "y": {"z": None}})], runtime_overrides={"a": {"w": None}}
    )
    with pytest.raises(InvalidPipeline) as raised:
        writing.convert(spec)
    assert [fault.path for fault in raised.value.faults] == [
        "stages[0].factoryArgs.x",
        "stages[0].factoryArgs.y.z",
        "runtimeOverrides.a.w",
    ]


@pytest.mark.parametrize("spelling", ["plain", "resource", "api"])
def test_null_in_yaml_is_an_entry_that_is_not_there(tmp_path: Path, spelling: str) -> None:
    spec: dict[str, Any] = {
        "modelPath": None,
        "relayBackend": None,
        "runtimeOverrides": {"a": {"x": None}},
        "envDefaults": {"A": None},
        "stages": [
            {"name": "a", "process": "a", "factory": "w:m", "terminal": True, "gpu": None, "relay": None}
            | {"factoryArgs": {"x": 1, "y": None, "z": {"w": None, "v": [None]}}}
        ],
    }
    resource = {**writing.resource(PLAIN), "spec": spec}
    match spelling:
        case "plain":
            loaded = loading.loads(json.dumps(spec))
        case "resource":
            loaded = loading.loads(json.dumps(resource))
        case _:
            loaded = loading.from_resource(resource)
    assert planned_args(loaded.spec) == {"x": 1, "z": {"v": [None]}}
    assert (loaded.spec.model_path, loaded.spec.relay_backend, loaded.spec.env_defaults) == (None, "auto", {})


def test_null_over_a_class_s_default_leaves_it_and_an_empty_list_clears_it(tmp_path: Path) -> None:
    written(tmp_path, FAMILY.replace('name: str = "mine"', 'name: str = "mine"\n    serves: list[str] = ["chat"]'))
    text = "config_cls: family:Mine\nmodel_path: null\n"
    kept = loading.load(written(tmp_path, text + "stages: [{name: a, gpu: null, factory_args: {k: null}}]\n", "p.yaml"))
    assert kept.spec.model_path == "class/model"
    assert (kept.spec.stage("a").gpus, kept.spec.stage("a").factory_args) == ((0,), {"k": 1, "j": 2})
    cleared = loading.load(written(tmp_path, text + "serves: []\nstages: [{name: a, gpu: []}]\n", "p.yaml"))
    assert (cleared.spec.serves, cleared.spec.stage("a").gpus) == ((), ())


# -------------------------------------------------------------- authors' code


SILENT = """
class Silent(Exception):
    def __str__(self):
        raise RuntimeError

raise Silent
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        (SILENT, "Silent"),
        ("def deep(): deep()\ndeep()\n", "RecursionError"),
        ("pipeline = (\n", "SyntaxError"),
        ("raise ValueError('a\\nb')\n", "ValueError: a b"),
        (FAMILY + "    def __post_init__(self):\n        raise SystemExit(3)\npipeline = Mine()\n", "SystemExit: 3"),
    ],
)
def test_whatever_a_module_does_while_it_is_loaded_is_reported_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    """A module that ends the program would end `omni up` without a word, and with its own exit code."""
    file = written(tmp_path, text)
    plain = written(tmp_path, "config_cls: family:Mine\n", "p.yaml")
    for path in (file, plain):
        with pytest.raises(UnreadableSpec) as raised:
            loading.load(path)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
