"""An author's ``deliver`` keeps usage and the reason of the end: both reach the client of a terminal stage."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.api import Generation
from stage_runtime.engines.autoregressive.stage.client_reports import ClientReport
from stage_runtime.engines.autoregressive.stage.thread_engine import AutoregressiveEngine
from stage_runtime.wire.outputs import USAGE_SO_FAR
from stage_runtime.wire.values import Chunk, Finish, Result, StagePayload, Text, Usage
from tests.engines.engine_kit import running
from tests.engines.generation_kit import ScriptedExecutor, scripted_core, tiny_tokenizer

FIRST = Generation(text="a", completion_tokens=1, prompt_tokens=5, cached_tokens=2)
LAST = Generation(text="", completion_tokens=3, prompt_tokens=5, cached_tokens=2, finish="length", ends=True)
ALL = [Usage(5, 3, 2), Finish("length")]


def given(*steps: tuple[Generation, list[Any]], completes: bool = True) -> list[Any]:
    report = ClientReport(completes=completes)
    return [item for generation, items in steps for item in report.added_to(items, generation)]


def test_what_an_author_leaves_out_is_added_before_the_result() -> None:
    found = given((FIRST, [Chunk(Text("a"))]), (LAST, [Result(None)]))
    assert [(one.data, one.to) for one in found[:2]] == [(Text("a"), None), (ALL, "coordinator")]
    assert found[2:] == [Result(None)]


@pytest.mark.parametrize(
    ("last", "added"),
    [
        ([Result(ALL)], []),
        ([Chunk(ALL)], []),
        ([Result(Finish("stop"))], [[Usage(5, 3, 2)]]),
        ([Result([Usage(1, 1)])], [[Finish("length")]]),
        ([Result({"finish": "stop"})], [ALL]),
        ([], [ALL]),
    ],
)
def test_what_an_author_gives_is_not_given_again(last: list[Any], added: list[Any]) -> None:
    found = given((FIRST, [Chunk(Text("a"))]), (LAST, last))
    assert [one.data for one in found if isinstance(one, Chunk) and one.to == "coordinator"] == added


def test_a_pipelines_client_gets_what_the_author_gives_alone() -> None:
    assert given((LAST, [Result({"a": 1})]), completes=False) == [Result({"a": 1})]


def test_every_choice_that_ended_has_its_reason() -> None:
    other = Generation(text="", completion_tokens=4, prompt_tokens=5, choice=1, finish="stop")
    found = given((FIRST, []), (other, []), (LAST, []))
    assert [one.data for one in found] == [[Usage(5, 7, 2), Finish("length", 0), Finish("stop", 1)]]


def test_chunks_for_a_client_carry_the_tokens_so_far_and_keep_their_own_metadata() -> None:
    found = given((FIRST, [Chunk(Text("a"), metadata={"own": 1}), Chunk({"not": "shown"}), Chunk(7)]))
    assert [one.metadata for one in found] == [{"own": 1, USAGE_SO_FAR: [5, 1, 2]}, None, None]


def test_what_follows_a_result_follows_it_still() -> None:
    found = given((LAST, [Result(1), Chunk(Text("late"))]))
    assert found[0] == Result(1) and found[1].data == Text("late")


class Context:
    """`api.StageContext` of a stage whose output is the client's."""

    name, device, terminal = "chat", "cpu", True
    model_path: str | None = None
    model_revision: str | None = None
    rendezvous: str | None = None
    tp_rank, tp_size = 0, 1
    kv_role = ""
    kv: Any = None
    logger = logging.getLogger("stage.chat")

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        raise AssertionError("nothing is allocated")

    def emit(self, event: str, request_id: str, /, **metadata: Any) -> None: ...

    def progress(self, message: str, done: float = 0, total: float = 0, unit: str = "") -> None: ...


def test_a_stage_with_an_own_deliver_reports_usage_and_finish() -> None:
    def deliver(payload: StagePayload, generation: Generation) -> Any:
        if generation.text:
            yield Chunk(Text(generation.text.upper()))

    def prompt(payload: StagePayload) -> omni.Prompt:
        return omni.Prompt(tokens=[97], params={"max_tokens": 3, "temperature": 0})

    spec = omni.Autoregressive(model="", prompt=prompt, deliver=deliver)
    engine = AutoregressiveEngine(spec, scripted_core(ScriptedExecutor()), tiny_tokenizer(), Context())
    with running(engine) as rig:
        rig.start("r", None, kind="chat")
        found = [rig.outbox.next()]
        while found[-1][1] != "done":
            found.append(rig.outbox.next())
    assert found[-2:] == [("r", "chunk", [Usage(1, 3), Finish("length")]), ("r", "done")]
