"""Errors that are hostile objects themselves: they fail their request like any other, whichever engine meets them.

And threads of a stage that end: that is reported, and ends the process. Real stages and engines, the wire's own codec.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.making import resolving
from stage_runtime.errors import (
    CODES,
    HookError,
    ProtocolError,
    TransferError,
    ValueRefused,
    describe,
    format_traceback,
    safe_str,
)
from stage_runtime.payloads import encoding
from stage_runtime.rules.graph import routing
from stage_runtime.rules.requests.failures import failure_of, log_failure
from stage_runtime.stage.ranks.tensor_parallel import LeaderInbox
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Complete
from stage_runtime.wire.parts import Failure
from stage_runtime.wire.values import OmniRequest, StagePayload
from tests.stage.stage_kit import OWNER, PATIENCE_S, World, plan, world


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Numeric(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class Sticky(str):
    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        raise ValueError("not to be encoded")

    def __getitem__(self, key: Any) -> str:
        raise ValueError("not to be cut")


class Glued(Exception):
    def __str__(self) -> str:
        return Sticky("glued")


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError("no name")


class Unnamed(Exception, metaclass=Nameless):
    pass


class Hollow(omni.RequestError):
    """Its attributes cannot be had."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("code", "message", "stage", "hook", "param"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def changed(error: BaseException, **attributes: Any) -> BaseException:
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


MEGABYTES = "x" * 3_000_000
ERRORS: dict[str, Callable[[], BaseException]] = {
    "str raises": Mute,
    "str exits": Exits,
    "str gives an int": Numeric,
    "str never ends": Endless,
    "str gives an odd str": Glued,
    "a type without a name": lambda: Unnamed("x"),
    "megabytes": lambda: ValueError(MEGABYTES),
    "surrogates": lambda: OSError("caf\udce9"),
    "a mute cause": lambda: caused(ValueError("no"), Mute()),
    "odd notes": lambda: changed(ValueError("no"), __notes__=5),
    "a group": lambda: BaseExceptionGroup("several", [Mute(), SystemExit(1)]),
    "an exit": lambda: SystemExit(3),
    "an interrupt": KeyboardInterrupt,
    "a generator's exit": GeneratorExit,
    "a param that is a path": lambda: omni.InvalidRequest("no", param=Path("a/b")),  # type: ignore[arg-type]
    "a param of megabytes": lambda: omni.InvalidRequest("no", param=MEGABYTES),
    "a param that is a number": lambda: omni.InvalidRequest("no", param=3),  # type: ignore[arg-type]
    "a message that is None": lambda: omni.InvalidRequest(None),  # type: ignore[arg-type]
    "a message that is mute": lambda: omni.InvalidRequest(Mute()),  # type: ignore[arg-type]
    "a stage that is a list": lambda: omni.RequestError("invalid_request", "no", stage=["a"]),  # type: ignore[arg-type]
    "a stage of megabytes": lambda: omni.RequestError("invalid_request", "no", stage=MEGABYTES),
    "a hook that is a number": lambda: omni.RequestError("invalid_request", "no", hook=7),  # type: ignore[arg-type]
    "a code that is not one": lambda: omni.RequestError("no_such_code", "no"),
    "a code that is a list": lambda: changed(omni.InvalidRequest("no"), code=["invalid_request"]),
    "no attributes": lambda: Hollow("invalid_request", "no"),
    "a hook error without a stage": lambda: HookError(None, None, None),  # type: ignore[arg-type]
    "a refused value": lambda: ValueRefused(MEGABYTES, MEGABYTES),
    "a transfer": lambda: TransferError(MEGABYTES),
    "garbage": lambda: ProtocolError("\udc80"),
}


def sync(payload: omni.StagePayload) -> Any:
    if payload.data in ERRORS:
        raise ERRORS[payload.data]()
    return payload.data


async def asynchronous(payload: omni.StagePayload) -> Any:
    return sync(payload)


def generator(payload: omni.StagePayload) -> Any:
    yield omni.Result(sync(payload))


def batch(payloads: list[omni.StagePayload]) -> list[Any]:
    return [ERRORS[one.data]() if one.data in ERRORS else one.data for one in payloads]


async def streaming(session: omni.Session) -> AsyncIterator[Any]:
    yield omni.Result(sync(await session.payload()))


class Loop:
    def run(self, inbox: Any, outbox: Any, stop: threading.Event) -> None:
        for event in inbox:
            if isinstance(event, events.Start):
                data = event.payload.data
                hostile = data in ERRORS
                outbox.put(
                    events.Failed(event.request_id, ERRORS[data]()) if hostile else events.Done(event.request_id, data)
                )


ENGINES: dict[str, Callable[[], Any]] = {
    "sync": lambda: sync,
    "two workers": lambda: omni.Simple(sync, concurrency=2),
    "async": lambda: asynchronous,
    "generator": lambda: generator,
    "batched": lambda: omni.Batched(batch),
    "streaming": lambda: omni.Streaming(streaming),
    "custom": Loop,
}


@pytest.mark.proves("hostile-exception")
@pytest.mark.parametrize("engine", ENGINES)
async def test_an_error_that_cannot_be_printed_fails_its_request_and_the_next_one_is_served(engine: str) -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True)], {"a": ENGINES[engine]()})
        for name in ERRORS:
            made.submit(f"bad {name}", "a", name)
        made.submit("good", "a", "y")
        await made.until(lambda: len(made.failed()) == len(ERRORS) and "good" in made.results())
        for failure in made.failed().values():
            assert failure.code in CODES
            assert failure.stage and failure.hook
            assert len(failure.message) <= 2000
        assert made.results() == {"good": "y"}
        assert made.failures == [], "the process goes on"


@pytest.mark.proves("hostile-exception")
@pytest.mark.parametrize("name", ERRORS)
def test_whatever_was_raised_becomes_a_failure_that_can_be_sent_and_a_line_in_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = ERRORS[name]()
    failure = failure_of(error, "a", "run")
    codec.check(Complete("r", 1, "a", failure=failure))
    assert failure.code in CODES
    with caplog.at_level(logging.INFO):
        log_failure("r", failure, error)
    (record,) = caplog.records
    assert "request r failed in" in record.getMessage()
    assert len(record.getMessage()) < 60_000
    for text in (safe_str(error), describe(error), format_traceback(error)):
        assert isinstance(text.encode(), bytes)


def test_what_we_refuse_is_logged_in_one_line_and_an_authors_exception_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        routing.route("a", ("b",), "c")
    except HookError as refusal:
        assert refusal.__traceback__ is not None
        refusal.__traceback__ = refusal.__traceback__.tb_next  # called by the runtime, not by this test
        log_failure("r", failure_of(refusal, "a", "routeFn"), refusal)
    try:
        encoding.extract({"x": {1}})
    except ValueRefused as refusal:
        assert refusal.__traceback__ is not None
        refusal.__traceback__ = refusal.__traceback__.tb_next  # called by the runtime, not by this test
        log_failure("r", failure_of(refusal, "a", "run"), refusal)
    try:
        raise KeyError("x")
    except KeyError as error:
        log_failure("r", failure_of(error, "a", "run"), error)
    misrouted, refused, failed = caplog.messages
    assert misrouted == "request r failed in a.routeFn: names ['c'], not in next; it declares ['b']"
    assert refused == "request r failed in a.run: payload.data['x']: set: use a list"
    assert failed.startswith("request r failed in a.run: KeyError: 'x'\nTraceback")


def test_a_module_with_a_syntax_error_is_shown_without_the_frames_that_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broken_stage.py"
    file.write_text("def (\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SyntaxError) as caught:
        resolving.resolve("broken_stage:create", field="stages.a.factory")
    caught.value.__traceback__ = caught.tb.tb_next  # called by the runtime, not by this test
    assert format_traceback(caught.value).removeprefix("Traceback (most recent call last):\n").splitlines() == [
        f'  File "{file}", line 1',
        "    def (",
        "        ^",
        "SyntaxError: invalid syntax",
    ]


def test_an_error_keeps_what_of_it_can_be_printed() -> None:
    assert failure_of(ERRORS["a param that is a path"](), "a", "run") == Failure(
        "invalid_request", "no", "a", "run", "a/b"
    )
    assert failure_of(ERRORS["a stage that is a list"](), "a", "run") == Failure("invalid_request", "no", "a", "run")
    assert failure_of(ERRORS["a code that is a list"](), "a", "run") == Failure("stage_failed", "no", "a", "run")
    assert failure_of(ERRORS["str raises"](), "a", "run") == Failure(
        "stage_failed", "Mute: <Mute, whose text cannot be had: ValueError>", "a", "run"
    )


class Unsent:
    """`arrivals.Sealed` of which nothing can be had."""

    def open(self) -> Any:
        raise AssertionError("nobody wants it")

    def copy_out(self) -> None: ...

    def discard(self) -> None:
        raise MemoryError("on purpose")


def hold(made: World, name: str, *, concurrency: int) -> tuple[Callable[[omni.StagePayload], Any], dict[str, Any]]:
    """A function whose requests stay until they are let go, and on which thread each one is."""
    held: dict[str, Any] = {}

    def function(payload: omni.StagePayload) -> Any:
        held[payload.request.id] = (threading.current_thread().name, let := threading.Event())
        assert let.wait(PATIENCE_S)
        return payload.data

    made.process(f"p{name}", [plan(name, terminal=True)], {name: omni.Simple(function, concurrency=concurrency)})
    return function, held


class Unmarkable:
    """`engines.base.Work` whose taking is a fault of ours."""

    request_id = "late"
    cancelled = over = False

    def __setattr__(self, name: str, value: object) -> None:
        raise MemoryError


class Late(Unsent):
    """`engines.base.InboxItem` that no thread can take."""

    work: Any = Unmarkable()


@pytest.mark.proves("stage-thread-ends")
async def test_a_worker_thread_that_ends_is_reported_while_the_others_still_compute() -> None:
    async with world() as made:
        _, held = hold(made, "a", concurrency=2)
        made.submit("r1", "a", "x")
        await made.until(lambda: "r1" in held)
        if held["r1"][0] != "a":  # a worker has it: the stage's own thread takes the next one, and the worker is free
            made.submit("r2", "a", "x")
            await made.until(lambda: "r2" in held)
            held["r1"][1].set()
        made.hosts["pa"].stages["a"].inbox.put(Late())
        await made.until(lambda: made.failures != [])
        assert [(name, type(error)) for name, error in made.failures] == [("a", MemoryError)]
        for _, let in held.values():
            let.set()


@pytest.mark.proves("stage-thread-ends")
async def test_a_hook_thread_that_ends_is_reported() -> None:
    async with world() as made:
        for name in ("a", "b"):
            made.process(f"p{name}", [plan(name, next=("join",))], {name: lambda payload: {"id": payload.request.id}})
        join = plan(
            "join", wait_for=("a", "b"), inputs_from=("a", "b"), merge_fn="stage_functions:held_merge", terminal=True
        )
        made.process("pj", [join], {"join": lambda payload: payload.data})
        import stage_functions

        for name in ("a", "b"):
            made.submit("r1", name)
        await made.until(stage_functions.merging.is_set)
        stage_input = made.hosts["pj"].stages["join"].input
        stage_input.payload(made.header("late"), "a", Unsent())
        late = stage_input.find(OWNER, "late", 1)
        assert late is not None
        late.abort()  # and nobody has freed what waits of it
        stage_functions.merge_on.set()
        await made.until(lambda: made.failures != [])
        assert [(name, type(error)) for name, error in made.failures] == [("join", MemoryError)]


class Returns:
    """A loop that ends unasked."""

    def run(self, inbox: Any, outbox: Any, stop: threading.Event) -> None:
        inbox.get()


@pytest.mark.proves("stage-thread-ends")
async def test_an_engine_whose_loop_ends_unasked_ends_the_process() -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True)], {"a": Returns()})
        made.submit("r1", "a", "x")
        await made.until(lambda: made.failures != [] and "r1" in made.failed())


class Work:
    cancelled = False
    over = False

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


class Opened:
    def __init__(self, work: Any, data: Any) -> None:
        self.work = work
        self._data = data

    def open(self) -> events.Incoming:
        return events.Start(self.work.request_id, StagePayload(request=OmniRequest(id="r"), data=self._data), self.work)

    def discard(self) -> None: ...


@pytest.mark.parametrize("waits", [True, False], ids=["get", "get_nowait"])
def test_what_cannot_be_sent_to_the_ranks_fails_its_request_and_rank_0_takes_the_next(waits: bool) -> None:
    """The result of a merge has not travelled yet, and need not be able to."""
    failed: list[str] = []
    sent: list[tuple[str, str]] = []

    def tell(kind: str, work: Any = None, fields: dict[str, Any] | None = None) -> None:
        if work.request_id == "bad":
            raise ValueRefused("payload.data", "object of type object")
        sent.append((kind, work.request_id))

    inbox = LeaderInbox(lambda work, error: failed.append(work.request_id), tell)
    for request_id in ("bad", "good"):
        inbox.put(Opened(Work(request_id), object()))
    event = inbox.get(1.0) if waits else inbox.get_nowait()
    assert isinstance(event, events.Start) and event.request_id == "good"
    assert (failed, sent) == (["bad"], [("start", "good")])
