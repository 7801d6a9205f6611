"""A child's settings read its environment; nothing else gets through."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import GpuMemory, PipelineConfig, StageConfig
from omnipipeline_spec.types.plan import PipelinePlan, UnitPlan
from stage_runtime import settings
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.preparing import preflight
from stage_runtime.processes.starting import launching
from stage_runtime.processes.starting.launching import StageLaunch


def planned() -> PipelinePlan:
    """A TP stage on GPUs 2 and 5 that shares the latter with another group, and a CPU stage."""
    half = GpuMemory(fraction=0.4)
    return planning.plan(
        PipelineConfig(
            name="p",
            stages=[
                StageConfig(name="front", process="front", factory="m:f", next="thinker"),
                StageConfig(name="thinker", factory="m:f", gpu=[5, 2], tp_size=2, gpu_memory=half, next="vocoder"),
                StageConfig(name="vocoder", process="vocoder", factory="m:f", gpu=5, gpu_memory=half, terminal=True),
            ],
            env_defaults={"HF_HUB_OFFLINE": "1"},
        )
    )


def unit(name: str) -> UnitPlan:
    return next(one for one in planned().units if name in [group.name for group in one.groups])


def launch(
    tmp_path: Path, name: str, base: dict[str, str], gpus: tuple[str, ...] | None = None
) -> list[dict[str, str]]:
    plan_file = tmp_path / "unit.json"
    plan_file.write_bytes(msgspec.json.encode(unit(name)))
    group = next(group for group in unit(name).groups if group.name == name)
    spec = launching.stage_instance(
        StageLaunch(
            unit=unit(name),
            group=group,
            plan_file=plan_file,
            replica=1,
            coordinators="ipc:///run/coordinator.sock",
            environment=launching.environment(base, path=[Path("/code")], code_dir=None),
            addresses=launching.local_addresses(tmp_path, group.processes),
            gpus=gpus,
        )
    )
    return [command.env for command in spec.commands()]


def test_every_rank_reads_back_the_environment_made_for_it(tmp_path: Path) -> None:
    first, second = (settings.stage(env) for env in launch(tmp_path, "thinker", {"PATH": "/bin"}, gpus=("2", "5")))
    assert (first.process, second.process) == ("thinker_tp0", "thinker_tp1")
    assert first.tp_endpoints == second.tp_endpoints == (second.listen,)
    assert first.rendezvous == second.rendezvous
    assert first.advertise == first.listen != second.listen
    assert [one.gpu_id(one.stages()[0]) for one in (first, second)] == [1, 0]  # gpu: [5, 2], renumbered
    assert first.coordinators == ("ipc:///run/coordinator.sock",)
    assert first.control_key is None


def test_each_life_of_an_instance_has_addresses_of_its_own(tmp_path: Path) -> None:
    addresses = launching.local_addresses(tmp_path, ["voice"])
    first = addresses().listen
    (tmp_path / "voice-0.sock").touch()
    assert addresses().listen != first
    assert list(tmp_path.iterdir()) == []


def test_variables_of_ours_are_not_inherited_by_accident(tmp_path: Path) -> None:
    stray = {"OMNI_CONTROL_KEY_FILE": "/elsewhere", "OMNI_GPUS": "7", "OMNI_LOG_FORMAT": "json", "PYTHONPATH": "/mine"}
    stray["OMNI_MODELS_DIR"] = "/models"
    (env,) = launch(tmp_path, "front", stray)
    assert "OMNI_CONTROL_KEY_FILE" not in env
    assert "OMNI_GPUS" not in env
    assert env["OMNI_LOG_FORMAT"] == "json"
    assert env["OMNI_MODELS_DIR"] == "/models", "a stage looks there for the model that a Job has fetched"
    assert env["PYTHONPATH"] == "/code:/mine"


def test_no_devices_is_not_the_same_as_all_devices(tmp_path: Path) -> None:
    (hidden,) = launch(tmp_path, "front", {}, gpus=())
    (unsaid,) = launch(tmp_path, "front", {}, gpus=None)
    environ: dict[str, str] = {}
    settings.prepare(environ, settings.stage(hidden))
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    assert settings.stage(unsaid).gpus is None


def test_a_value_that_the_process_has_already_wins_over_the_plans_default(tmp_path: Path) -> None:
    (env,) = launch(tmp_path, "front", {})
    environ = {"HF_HUB_OFFLINE": "0"}
    settings.prepare(environ, settings.stage(env))
    assert environ["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize(
    ("group", "devices", "shown", "visible"),
    [
        ("thinker", (2, 5), None, ("2", "5")),  # the author's ids are devices
        ("thinker", (0, 1), None, ("0", "1")),  # localGpus, in the order of the ids
        ("vocoder", (7,), None, ("2", "7")),  # the other group's place is kept
        ("thinker", (0, 1), "6,GPU-a", ("6", "GPU-a")),  # ids count what the user has made visible
        ("front", (), None, ()),
        ("front", (), "3", ()),
    ],
)
def test_devices_are_shown_so_that_the_plans_numbers_fit(
    group: str, devices: tuple[int, ...], shown: str | None, visible: tuple[str, ...]
) -> None:
    plan = next(one for one in unit(group).groups if one.name == group)
    assert launching.visible_gpus(unit(group), plan, devices, shown) == visible


def test_a_device_that_the_user_has_hidden_is_named() -> None:
    plan = next(one for one in unit("thinker").groups if one.name == "thinker")
    with pytest.raises(ConfigurationError, match="thinker needs GPU 5, and CUDA_VISIBLE_DEVICES=0,1,2 shows 3 of them"):
        launching.visible_gpus(unit("thinker"), plan, (2, 5), "0,1,2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"OMNI_PLAN": ""}, "OMNI_PLAN is not set"),
        ({"OMNI_PLAN": "/nowhere"}, "OMNI_PLAN: /nowhere: No such file"),
        ({"OMNI_GROUP": "thinkr"}, "OMNI_GROUP: 'thinkr' is not a process group of unit thinker, which has thinker"),
        ({"OMNI_TP_RANK": "2"}, "OMNI_TP_RANK: 2, but thinker has ranks 0..1"),
        ({"OMNI_TP_RANK": "one"}, "OMNI_TP_RANK: 'one' is not a whole number"),
        ({"OMNI_RENDEZVOUS": ""}, "OMNI_RENDEZVOUS is not set, and thinker has 2 ranks"),
        ({"OMNI_TP_ENDPOINTS": "a,b,c"}, "OMNI_TP_ENDPOINTS: 3 endpoints for ranks 1..1"),
        ({"OMNI_COORDINATOR": ""}, "OMNI_COORDINATOR is not set"),
        ({"OMNI_LOG_FORMAT": "xml"}, "OMNI_LOG_FORMAT: 'xml' is neither text nor json"),
        ({"OMNI_LOG_LEVEL": "loud"}, "OMNI_LOG_LEVEL: expected one of debug, info, warning, error, got 'loud'"),
        ({"OMNI_DEBUG_VALUES": "yes"}, "OMNI_DEBUG_VALUES: 'yes' is neither 0 nor 1"),
        ({"OMNI_ARENA_MB": "0"}, "OMNI_ARENA_MB: '0' is not a whole number of 1 or more"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, change: dict[str, str], message: str) -> None:
    env = launch(tmp_path, "thinker", {}, gpus=("2", "5"))[0]
    with pytest.raises(ConfigurationError) as caught:
        settings.stage({**env, **change})
    assert str(caught.value).startswith(message)


def test_a_key_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    (env,) = launch(tmp_path, "front", {})
    key = tmp_path / "key"
    key.write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="OMNI_CONTROL_KEY_FILE: 5 bytes, a control key has 32"):
        settings.stage({**env, "OMNI_CONTROL_KEY_FILE": str(key)})


def test_a_plan_of_a_later_version_is_refused_and_not_misread(tmp_path: Path) -> None:
    (env,) = launch(tmp_path, "front", {})
    later = msgspec.structs.replace(unit("front"), version=99)
    Path(env["OMNI_PLAN"]).write_bytes(msgspec.json.encode(later))
    with pytest.raises(ConfigurationError, match="is of plan version 99, this program knows 1"):
        settings.stage(env)


def test_a_plan_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (env,) = launch(tmp_path, "front", {})
    Path(env["OMNI_PLAN"]).write_bytes(b'{"pipeline":"\xff"}')
    with pytest.raises(ConfigurationError, match="is not a UnitPlan: 'utf-8' codec can't decode byte 0xff"):
        settings.stage(env)


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ([], 0),
        (["null", "nvidiactl", "nvidia-uvm"], 0),
        (["nvidia0", "nvidia1", "nvidiactl"], 2),
        (["kfd"], None),
        (["dxg"], None),
        (["nvidia0", "dxg"], 1),
    ],
)
def test_the_gpus_of_this_machine_are_its_device_files(tmp_path: Path, files: list[str], count: int | None) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert launching.gpus_here(tmp_path) == count


@pytest.mark.parametrize("host", ["\udcff", "a\0b", "a..b", "1.2.3.4.5"])
def test_a_host_that_no_socket_can_have_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        preflight.check_port(host, 8000)
