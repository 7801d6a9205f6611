"""The tables of the documentation say what the code says."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

import stage_runtime as omni
from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types import canonical, pods
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.validation.deployment import reserved_ports
from stage_runtime import errors, settings
from stage_runtime.relays.base import Relay
from stage_runtime.wire import frames, messages, parts
from tests.docs.blocks import FENCE, ROOT, blocks

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = (
    ROOT / "crds/omnipipeline_spec",
    ROOT / "operator/omnipipeline_operator",
    ROOT / "stage_runtime",
    ROOT / "stage_models",
)


def table(mark: str, document: str = "docs/contracts.md") -> list[list[str]]:
    """The rows of the table behind ``<!-- mark: … -->``, without its head."""
    text = (ROOT / document).read_text()
    lines = text[text.index(f"<!-- {mark}: ") :].splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_message_stands_in_the_table_with_its_tag_and_fields() -> None:
    documented = {row[1].strip("`"): (int(row[0]), named(row[2])) for row in table("messages")}
    assert documented == {
        kind.__name__: (kind.__struct_config__.tag, list(kind.__struct_fields__))
        for kind in typing.get_args(messages.Message)
    }


def test_a_frame_is_described_in_its_own_order() -> None:
    described = re.search(r"One MessagePack array per frame: ([^.]*)\.", (ROOT / "docs/contracts.md").read_text())
    assert described is not None
    assert tuple(re.split(r",\s", described.group(1))) == frames.Envelope.__struct_fields__


def test_every_code_stands_in_the_table_with_its_status() -> None:
    assert {row[0].strip("`"): int(row[1]) for row in table("codes")} == errors.CODES


def test_every_name_of_a_relay_stands_in_the_table() -> None:
    declared = {name for name in vars(Relay) if not name.startswith("_")}
    assert {row[0].strip("`") for row in table("relay")} == declared


def test_the_ports_are_those_of_the_settings_and_none_of_them_can_be_chosen() -> None:
    ports = {int(row[0]) for row in table("ports")}
    own = {pods.ADMIN_PORT, pods.PROBE_PORT, pods.PUBLISH_PORT, pods.CONTROL_PORT}
    assert ports == own | {PipelineConfig(stages=[]).coordinator.http.port}
    assert reserved_ports() == own | set(range(pods.CONTROL_PORT, 5613 + 1))


class Asked(dict[str, str]):
    """An environment that remembers what it was asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[tuple[PipelinePlan, dict[str, str]]]:
    """A plan with a TP stage, and an environment in which every role would start."""
    stage = StageConfig(name="big", factory="m:f", gpu=[0, 1], tp_size=2, terminal=True)
    plan = planning.plan(PipelineConfig(name="p", stages=[stage]))
    for name, value in (("unit", plan.units[0]), ("coordinator", plan.coordinator)):
        (tmp_path / name).write_bytes(msgspec.json.encode(value))
    yield (
        plan,
        {
            "OMNI_PLAN": str(tmp_path / "unit"),
            "OMNI_GROUP": "big",
            "OMNI_LISTEN": "tcp://127.0.0.1:1",
            "OMNI_COORDINATOR": "tcp://127.0.0.1:2",
            "OMNI_TP_ENDPOINTS": "tcp://127.0.0.1:3",
            "OMNI_RENDEZVOUS": "tcp://127.0.0.1:4",
            "OMNI_REVISIONS": str(tmp_path / "revisions"),
            "OMNI_PUBLISH": "tcp://127.0.0.1:5",
        },
    )


def test_every_variable_that_a_process_reads_stands_in_the_table(
    planned: tuple[PipelinePlan, dict[str, str]], tmp_path: Path
) -> None:
    _, environment = planned
    stage, coordinator = Asked(environment), Asked({**environment, "OMNI_PLAN": str(tmp_path / "coordinator")})
    settings.stage(stage)
    settings.coordinator(coordinator)
    rows = {row[0]: set(named(row[1])) for row in table("environment")}
    assert rows == {
        "every role": stage.names & coordinator.names,
        "stage": stage.names - coordinator.names,
        "coordinator": coordinator.names - stage.names,
    }


def test_every_variable_that_is_read_is_explained_beside_the_command() -> None:
    read = set(re.findall(r'"(OMNI_[A-Z_]+)"', (ROOT / "stage_runtime/settings.py").read_text()))
    explained = set(re.findall(r"OMNI_[A-Z_]+", (ROOT / "docs/cli.md").read_text()))
    assert read - explained == set()


def test_older_readers_skip_new_fields_of_parts_and_refuse_those_of_messages() -> None:
    header = msgspec.to_builtins(parts.Header("r", 1, "c", {}))
    assert msgspec.convert([*header, "new"], parts.Header).request_id == "r"
    ready = msgspec.to_builtins(messages.Ready())
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([*ready, "new"], messages.Ready)


def rooms(package: Path) -> Iterator[str]:
    """The names that the house must have: a package's folders, and the modules at its door."""
    for path in sorted(package.iterdir()):
        if path.is_dir() and any(path.glob("*.py")):
            yield f"{path.name}/"
        elif path.suffix == ".py" and not path.name.startswith("__"):
            yield path.stem


def test_the_house_has_the_rooms_that_it_is_said_to_have() -> None:
    house = next(block for block in blocks("docs/architecture.md", "") if "THE CONTRACT" in block)
    documented: dict[str, set[str]] = {}
    for line in house.splitlines():
        if not line.startswith(" "):
            current = line.split()[0]
            continue
        words = re.split(r"\s{4,}", line.strip())[0].split()
        documented.setdefault(current, set()).update(words)
    for package in PACKAGES:
        there = set(rooms(package))
        stated = documented[f"{package.relative_to(ROOT)}/"]
        assert stated == there, f"{package.name}: {sorted(stated ^ there)}"


def test_every_link_leads_somewhere() -> None:
    broken = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", _prose(document)):
            path, _, anchor = target.partition("#")
            found = (document.parent / path) if path else document
            if not found.exists() or (anchor and found.suffix == ".md" and anchor not in _anchors(found)):
                broken.append(f"{document.name}: {target}")
    assert broken == []


def _prose(document: Path) -> str:
    """The text without code, in which brackets mean something else."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", document.read_text()))


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_plan_is_encoded_in_one_way(planned: tuple[PipelinePlan, dict[str, str]]) -> None:
    """The same plan gives the same bytes, whoever encodes it, as decisions.md has it."""
    plan, _ = planned
    assert canonical.encode(plan) == canonical.encode(msgspec.json.decode(canonical.encode(plan), type=PipelinePlan))


def test_every_setting_of_the_engine_stands_in_its_table_with_its_default() -> None:
    explained_elsewhere = {"model", "prompt", "deliver", "stream", "hidden_rows", "params"}
    documented: dict[str, str] = {}
    for row in table("engine-settings", "docs/engine.md"):
        names, defaults = named(row[0]), row[1].split(", ") if "," in row[0] else [row[1]]
        documented |= dict(zip(names, (default.strip("`") for default in defaults), strict=True))
    fields = msgspec.structs.fields(omni.Autoregressive)
    assert documented == {field.name: str(field.default) for field in fields if field.name not in explained_elsewhere}
