"""From a dotted name to an engine, and errors that name the place."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import factories
import pytest
from engine_kit import running

import stage_runtime as omni
from omnipipeline_spec.plan import StagePlan
from stage_runtime.engines.batched import BatchedEngine
from stage_runtime.engines.custom import CustomEngine
from stage_runtime.engines.loading import as_engine, create, resolve
from stage_runtime.engines.simple import AsyncEngine, SyncEngine
from stage_runtime.engines.streaming import StreamingEngine
from stage_runtime.errors import ConfigurationError


class Here:
    """`api.StageContext`."""

    name = "talker"
    device = "cpu"
    model_path = None
    model_revision = None
    tp_rank = 0
    tp_size = 1
    logger = logging.getLogger("talker")

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any: ...
    def emit(self, event: str, request_id: str, **metadata: Any) -> None: ...
    def progress(self, message: str) -> None: ...


def result_of(plan: StagePlan) -> Any:
    with running(create(plan, Here())) as rig:
        rig.start("r1", "data")
        return rig.outbox.next()[2]


def plan(factory: str, **arguments: Any) -> StagePlan:
    return StagePlan(name="talker", group="voice", factory=factory, factory_args=arguments)


@pytest.mark.parametrize("name", ["factories:plain", "factories.plain", "factories:Maker.make"])
def test_a_factory_is_found_by_either_spelling(name: str) -> None:
    assert result_of(plan(name)) == "data"


def test_a_factory_gets_its_arguments_and_of_what_is_offered_what_it_accepts() -> None:
    assert result_of(plan("factories:picky", times=2)) == (2, "alba", "talker", 0)


def test_what_the_author_set_wins_over_what_is_offered() -> None:
    assert result_of(plan("factories:picky", times=2, tp_rank=9))[3] == 9


def test_a_factory_with_keywords_gets_everything_that_was_set_and_nothing_offered() -> None:
    assert result_of(plan("factories:greedy", a=1, b=2)) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("plain", "no pkg.mod:function"),
        (":plain", "no pkg.mod:function"),
        ("factories:", "no pkg.mod:function"),
        (".factories:plain", "no pkg.mod:function"),
        ("no_such_module:plain", "no module named 'no_such_module'"),
        ("factories.inner:plain", "no module named 'factories.inner'"),
        ("factories:absent", "'factories' has no 'absent'"),
        ("factories:Maker.absent", "has no 'Maker.absent'"),
        ("factories:NUMBER", "is a int, no function"),
    ],
)
def test_a_name_that_leads_nowhere_is_blamed_with_its_field(name: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=r"stages\.talker\.factory: ") as caught:
        resolve(name, field="stages.talker.factory")
    assert problem in str(caught.value)


def test_an_error_inside_the_module_keeps_its_own_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_here"):
        resolve("needs_more:fn", field="x")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"times": 1, "tiems": 2}, "takes no tiems; it takes times, voice, context, tp_rank"),
        ({}, "missing a required argument: 'times'"),
    ],
)
def test_arguments_that_do_not_fit_are_blamed_on_factory_args(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=r"stages\.talker\.factoryArgs: factories:picky") as caught:
        create(plan("factories:picky", **arguments), Here())
    assert problem in str(caught.value)


def test_what_a_factory_raises_passes_through() -> None:
    with pytest.raises(OSError, match="no such checkpoint"):
        create(plan("factories:raising"), Here())


def test_a_factory_that_returns_nothing_runnable_is_blamed() -> None:
    with pytest.raises(ConfigurationError, match=r"stages\.talker\.factory: factories:nothing returned NoneType"):
        create(plan("factories:nothing"), Here())


class WithRun:
    def run(self, inbox: Any, outbox: Any, stop: Any) -> None: ...


async def coroutine(payload: Any) -> None: ...


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (factories.plain(), SyncEngine),
        (coroutine, AsyncEngine),
        (omni.Simple(factories.plain()), SyncEngine),
        (omni.Batched(lambda payloads: payloads), BatchedEngine),
        (omni.Streaming(lambda session: session.chunks()), StreamingEngine),
        (WithRun(), CustomEngine),
    ],
)
def test_each_kind_of_stage_function_has_its_engine(made: Any, kind: type) -> None:
    assert type(as_engine(made)) is kind


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (omni.Simple(factories.plain(), concurrency=0), r"omni.Simple\(concurrency=0\): at least 1"),
        (omni.Batched(lambda payloads: payloads, max_batch=0), r"omni.Batched\(max_batch=0\): at least 1"),
        (omni.Streaming(lambda session: session.chunks(), concurrency=0), r"omni.Streaming\(concurrency=0\)"),
    ],
)
def test_an_engine_that_would_never_run_anything_is_refused(made: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        as_engine(made)


def test_a_factory_is_told_the_model_and_its_revision() -> None:
    engine = create(plan("factories:pinned"), Here(), model_path="org/model", model_revision="abc")
    with running(engine) as rig:
        rig.start("r1", "data")
        assert rig.outbox.next()[2] == ["org/model", "abc"]
