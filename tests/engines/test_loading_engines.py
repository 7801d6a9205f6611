"""A dotted name becomes an engine, and errors name the place."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import factories
import pytest

import stage_runtime as omni
from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.batched import BatchedEngine
from stage_runtime.engines.custom import CustomEngine
from stage_runtime.engines.making.loading import as_engine, create
from stage_runtime.engines.making.resolving import resolve
from stage_runtime.engines.simple import AsyncEngine, SyncEngine
from stage_runtime.engines.streaming import StreamingEngine
from stage_runtime.errors import ConfigurationError
from tests.engines.engine_kit import running


class Here:
    """`api.StageContext`."""

    name = "talker"
    device = "cpu"
    model_path = None
    model_revision = None
    tp_rank = 0
    tp_size = 1
    kv_role = ""
    kv: Any = None
    terminal = False
    rendezvous = None
    logger = logging.getLogger("talker")

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any: ...
    def emit(self, event: str, request_id: str, /, **metadata: Any) -> None: ...
    def progress(self, message: str, done: float = 0, total: float = 0, unit: str = "") -> None: ...


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
        ("plain", "is not a pkg.mod:function"),
        (":plain", "is not a pkg.mod:function"),
        ("factories:", "is not a pkg.mod:function"),
        (".factories:plain", "is not a pkg.mod:function"),
        ("no_such_module:plain", "no module named 'no_such_module'"),
        ("factories.inner:plain", "no module named 'factories.inner'"),
        ("factories:absent", "'factories' has no 'absent'"),
        ("factories:Maker.absent", "has no 'Maker.absent'"),
        ("factories:NUMBER", "is not a function: it is of type int"),
        ("factoreis:plain", "no module named 'factoreis' (in 'factoreis:plain'); did you mean factories?"),
        ("json.decodr:x", "no module named 'json.decodr' (in 'json.decodr:x'); did you mean json.decoder?"),
        ("factories:plane", "'factories' has no 'plane'; did you mean plain?"),
        ("factories:Maker.maek", "has no 'Maker.maek'; did you mean Maker.make?"),
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


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("stage_function", "missing a required argument: 'payload'. A factory is called once, without a payload"),
        ("not_plain", "returned coroutine; .*A factory is a plain function; what it returns may be async"),
        ("yielding", "returned generator; .*A factory is called once, without a payload, and returns the function"),
        ("nothing", "returned NoneType; .*Is its return missing"),
        ("deaf", "returned a function that cannot be called with the payload alone: too many positional arguments"),
    ],
)
def test_what_is_named_instead_of_a_factory_is_refused_with_what_a_factory_does(factory: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        create(plan(f"factories:{factory}"), Here())


def test_a_module_of_the_working_directory_is_reported_as_lying_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lies_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="it is in the working directory, and stages import from the pipe"):
        resolve("lies_here:fn", field="x")


#: Factories as an author without a type checker writes them.
untyped: Any = omni


@pytest.mark.parametrize(
    "made",
    [untyped.Batched(lambda: [], max_batch=2), untyped.Streaming(lambda a, b: None), untyped.Simple(lambda *, x: x)],
)
def test_a_function_that_no_request_could_call_is_refused_when_it_is_loaded(made: Any) -> None:
    with pytest.raises(ConfigurationError, match="returned a function that cannot be called with the"):
        as_engine(made)


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
    ("made", "message"),
    [
        (omni.Simple(factories.plain(), concurrency=0), r"omni.Simple\(concurrency=0\): at least 1"),
        (omni.Batched(lambda payloads: payloads, max_batch=0), r"omni.Batched\(max_batch=0\): at least 1"),
        (omni.Streaming(lambda session: session.chunks(), concurrency=0), r"omni.Streaming\(concurrency=0\)"),
    ],
)
def test_an_engine_that_would_never_run_anything_is_refused(made: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        as_engine(made)


def test_a_factory_is_given_the_model_and_its_revision() -> None:
    engine = create(plan("factories:pinned"), Here(), model_path="org/model", model_revision="abc")
    with running(engine) as rig:
        rig.start("r1", "data")
        assert rig.outbox.next()[2] == ["org/model", "abc"]


def given(factory: str, arguments: dict[str, Any] | None = None, **facts: Any) -> Any:
    """The arguments that the factory was called with."""
    with running(create(plan(factory, **(arguments or {})), Here(), **facts)) as rig:
        rig.start("r1", "data")
        return rig.outbox.next()[2]


def test_a_factory_s_own_default_stands_where_the_pipeline_says_nothing() -> None:
    assert given("factories:defaulting") == ["default-model", 7, "main", 0, False]
    assert given("factories:defaulting", model_path="m", model_revision="r", gpu_id=0) == ["m", 0, "r", 0, False]
    assert given("factories:needing") == [None, None]


def test_none_that_an_author_says_in_python_reaches_the_factory() -> None:
    arguments = {"model_path": None, "gpu_id": None, "tp_rank": None}
    assert given("factories:defaulting", arguments, model_path="m", gpu_id=0) == [None, None, "main", None, False]


def test_without_gpus_a_factory_s_own_device_is_none_too() -> None:
    """A default ``gpu_id=7`` under ``omni up --cpu`` would reach for a device that is not there."""
    assert given("factories:defaulting", on_cpu=True) == ["default-model", None, "main", 0, False]


def generator(payload: Any) -> Any:
    yield omni.Chunk(payload)


async def async_generator(session: Any) -> Any:
    yield omni.Chunk(session)


class RunsOne:
    def run(self, payload: Any) -> Any: ...


class RunsAsync:
    async def run(self, inbox: Any, outbox: Any, stop: Any) -> None: ...


class Lazy:
    async def __call__(self, payload: Any) -> None: ...


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (untyped.Batched(coroutine), "omni.Batched of an async function: the function of a batch is a plain one"),
        (untyped.Batched(async_generator), "omni.Batched of an async function"),
        (untyped.Batched(Lazy()), "omni.Batched of an async function"),
        (untyped.Batched(generator), "omni.Batched of a generator: the function of a batch returns a list"),
        (
            untyped.Streaming(coroutine),
            "omni.Streaming of an async function without yield: it needs an async generator",
        ),
        (untyped.Streaming(generator), "omni.Streaming of a sync generator: it needs an async generator"),
        (RunsOne(), r"a RunsOne, whose run cannot be called with inbox, outbox and stop: .* omni.Simple\(made.run\)"),
        (RunsAsync(), "a RunsAsync with an async run or a generator: the engine's run is a plain function"),
        (WithRun, r"the class WithRun; expected an object of it: WithRun\(…\)"),
    ],
)
def test_what_would_fail_every_request_is_refused_when_it_is_loaded(made: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^the factory returned {message}"):
        as_engine(made)


class Model:
    """A function, with a method that happens to be called run."""

    def run(self, tokens: Any) -> Any: ...

    def __call__(self, payload: Any) -> Any: ...


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (Model(), SyncEngine),
        (omni.Simple(RunsOne().run), SyncEngine),
        (omni.Streaming(async_generator), StreamingEngine),
        (omni.Streaming(functools.partial(async_generator)), StreamingEngine),
    ],
)
def test_what_can_be_called_for_each_request_is_accepted(made: Any, kind: type) -> None:
    assert type(as_engine(made)) is kind


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"engine": "vllm"}, r"disaggregation: omni\.Autoregressive\(engine='vllm'\): engine='own' alone"),
        ({"prefix_caching": False}, r"\(prefix_caching=False\): blocks that come"),
        ({"remote_prefill_tokens": True}, r"\(remote_prefill_tokens=True\): 'auto', or at least 1"),
        ({"remote_prefill_tokens": 0}, r"\(remote_prefill_tokens=0\): 'auto', or at least 1"),
    ],
)
def test_a_stage_apart_whose_engine_transfers_no_kv_is_refused_before_it_loads(
    role: str, fields: dict[str, Any], says: str
) -> None:
    class Apart(Here):
        kv_role = role

    with pytest.raises(ConfigurationError, match=says):
        as_engine(omni.Autoregressive(model="/nowhere", **fields), context=Apart())
