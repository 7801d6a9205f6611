"""`omni.Autoregressive` as a stage: its answers, and that what goes wrong ends the request concerned alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.stage.thread_engine import AutoregressiveEngine
from stage_runtime.engines.making import loading
from stage_runtime.errors import ConfigurationError, ContextLengthExceeded
from stage_runtime.metrics import catalog
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.engine_kit import PATIENCE_S, Rig, gate, running
from tests.engines.generation_kit import (
    VOCABULARY,
    ScriptedExecutor,
    alone,
    scripted_core,
    tiny_model,
    tiny_tokenizer,
)

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def collect(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if generation.begins:
        yield omni.Chunk({"prompt": generation.prompt_tokens})
    elif generation.tokens:
        yield omni.Chunk(list(generation.tokens))
    if generation.finish is not None:
        yield omni.Result({"finish": generation.finish, "tokens": generation.completion_tokens})


def test_each_request_gets_the_tokens_that_transformers_gives_to_it_alone(checkpoint: Path) -> None:
    def factory(**settings: Any) -> omni.Autoregressive:
        return omni.Autoregressive(
            model=str(checkpoint), deliver=collect, params=GREEDY, max_chunk=5, block_size=4, **settings
        )

    texts = ["a", "the quick brown fox", "the quick brown cat", "zzz" * 9]
    found = omni.testing.run_stage(factory, texts, threads=1)
    for text, one in zip(texts, found, strict=True):
        begin, *pieces = one.data
        assert begin == {"prompt": len(text)}
        prompt = tiny_tokenizer()(text)["input_ids"]
        assert [token for piece in pieces for token in piece] == alone("llama", prompt, 12)
        assert one.result == {"finish": "length", "tokens": 12}


def test_a_prompt_or_parts_of_another_type_fail_their_request_with_what_was_expected(checkpoint: Path) -> None:
    def prompt(payload: omni.StagePayload) -> Any:
        return given[payload.data]

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Any:
        return None if payload.data == "deliver" else []

    given: dict[str, Any] = {
        "none": None,
        "dict": {"text": "x"},
        "text": omni.Prompt(text=5),  # type: ignore[arg-type]
        "params": omni.Prompt(text="x", params=[1]),  # type: ignore[arg-type]
        "message": omni.Prompt(messages="hello"),  # type: ignore[arg-type]
        "array": omni.Prompt(tokens=np.array([1, 2])),  # type: ignore[arg-type]
        "deliver": omni.Prompt(text="x"),
        "sound": omni.Prompt(text="x"),
    }
    factory = loading_of(checkpoint, prompt, deliver)
    *wrong, sound = omni.testing.run_stage(factory, list(given))
    assert [str(one.error) for one in wrong] == [
        "prompt returned NoneType; expected omni.Prompt",
        "prompt returned dict; expected omni.Prompt",
        "prompt returned omni.Prompt(text=…): expected a str, got int",
        "prompt returned omni.Prompt(params=…): expected a dict, got list",
        "prompt returned omni.Prompt(messages=…): expected a list of dicts",
        "tokens must be whole numbers, and one is of type int64: use .tolist() of the ndarray",
        "deliver returned NoneType; expected an iterable of omni.Chunk and omni.Result, [] for none",
    ]
    assert sound.error is None


def loading_of(checkpoint: Path, prompt: Any, deliver: Any) -> Callable[[], omni.Autoregressive]:
    params = {**GREEDY, "max_tokens": 2}
    return lambda: omni.Autoregressive(
        model=str(checkpoint), prompt=prompt, deliver=deliver, params=params, threads=1, kernels="torch"
    )


def test_a_chat_is_answered_in_text_for_the_client_with_usage_and_finish(checkpoint: Path) -> None:
    def factory() -> omni.Autoregressive:
        return omni.Autoregressive(model=str(checkpoint), params={**GREEDY, "max_tokens": 6})

    messages = [{"role": "user", "content": "hi"}]
    request = omni.OmniRequest(id="one", kind="chat", inputs={"messages": messages}, params={"max_tokens": 99})
    other = omni.OmniRequest(id="two", kind="chat", inputs={"messages": messages}, params={"top_p": 7})
    one, two = omni.testing.run_stage(factory, [request, other])
    prompt = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert all(isinstance(piece, omni.Text) for piece in one.data)
    expected = tiny_tokenizer().decode(alone("llama", prompt, 6), skip_special_tokens=True)
    assert "".join(piece.text for piece in one.data) == expected
    assert one.result == [omni.Usage(len(prompt), 6), omni.Finish("length")]
    assert isinstance(two.error, omni.InvalidRequest)


def test_the_usage_of_a_chat_says_how_much_of_its_prompt_was_cached(checkpoint: Path) -> None:
    def factory() -> omni.Autoregressive:
        return omni.Autoregressive(
            model=str(checkpoint), params={**GREEDY, "max_tokens": 2}, block_size=4, max_requests=2
        )

    inputs = {"messages": [{"role": "user", "content": "hello there"}]}
    asked = [
        omni.OmniRequest(id=name, kind="chat", inputs=inputs, params=params)
        for name, params in (("first", {}), ("again", {}), ("twice", {"n": 2}))
    ]
    first, again, twice = omni.testing.run_stage(factory, asked)
    prompt, cached = 13, 12  # three blocks
    assert [one.result[0] for one in (first, again)] == [omni.Usage(prompt, 2, 0), omni.Usage(prompt, 2, cached)]
    usages = [one for piece in (*twice.data, twice.result) if isinstance(piece, list) for one in piece]
    assert [one for one in usages if isinstance(one, omni.Usage)] == [
        omni.Usage(prompt, 2, cached),
        omni.Usage(0, 2, 0),
    ]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"policy": "random"}, "policy='random'"),
        ({"overlap": "sometimes"}, "overlap='sometimes'"),
        ({"tool_calls": "xml"}, "tool_calls='xml'"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"number_digits": 0}, "number_digits=0"),
        ({"kv_cache_bytes": 10}, r"kv_cache_bytes=10\): a KV cache of 10 bytes holds no block"),
        ({"block_size": 10**12}, r"block_size=1000000000000\): a KV cache of"),
        ({"speculative_config": {"method": "magic", "num_speculative_tokens": 3}}, "method='magic': one of ngram"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens is missing"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens=0"),
        ({"speculative_config": {"method": "ngram", "draft": 3}}, "no key 'draft'"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2.5}},
            "prompt_lookup_max=2.5",
        ),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_max": 2,
                    "prompt_lookup_min": 3,
                }
            },
            "prompt_lookup_min=3: more than",
        ),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
                "keep_rows": {"all": (0, "all")},
            },
            "does not go with keep_rows",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_when_the_stage_is_loaded(
    checkpoint: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        loading.as_engine(omni.Autoregressive(model=str(checkpoint), **settings))


def test_without_transformers_one_line_says_how_to_install_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'omnipipeline\[engine\]'"):
        loading.as_engine(omni.Autoregressive(model=str(checkpoint)))


class Stage:
    """An engine whose model is a script: the answer to a text is the bytes that follow its last one."""

    def __init__(self, deliver: Callable[..., Any] = collect, **limits: Any) -> None:
        self.executor = ScriptedExecutor()
        self.core: EngineCore = scripted_core(self.executor, **limits)
        spec = omni.Autoregressive(model="", prompt=prompt, deliver=deliver, params={**GREEDY, "max_tokens": 50})
        self.engine = AutoregressiveEngine(spec, self.core, tiny_tokenizer(), None)

    def at_rest(self, rig: Rig) -> None:
        """Check after the engine's end that nothing of any request is left."""
        pool = self.core.scheduler.pool
        assert pool.free == pool.capacity
        assert rig.inbox.parking.all == 0


def deliver_text(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if generation.finish is not None:
        yield omni.Result(generation.answer)


def prompt(payload: omni.StagePayload) -> omni.Prompt:
    data = payload.data
    if isinstance(data, Exception):
        raise data
    params = {
        "max_tokens": 3,
        "temperature": 0,
        **{key: data[key] for key in data.keys() & {"max_tokens", "n", "stop_token_ids"}},
    }
    where = {"pin": "a", "data_parallel_rank": data.get("data_parallel_rank")}
    return omni.Prompt(tokens=data["tokens"], params=params, priority=data.get("priority", 0), **where)


def test_a_request_that_cannot_be_computed_fails_alone() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        rig.start("a", {"tokens": []})
        rig.start("b", {"tokens": [1] * 120})
        rig.start("c", {"tokens": [9999]})
        rig.start("d", KeyError("no such thing"))
        rig.start("e", {"tokens": [1], "max_tokens": -1})
        rig.start("f", {"tokens": [7]})
        found = rig.outbox.several(10)
    assert [one[0] for one in found if one[1] == "failed"] == list("abcde")
    assert [one[2].partition(":")[0] for one in found if one[1] == "failed"] == [
        "InvalidRequest",
        "ContextLengthExceeded",
        "InvalidRequest",
        "KeyError",
        "InvalidRequest",
    ]
    assert [one[1:] for one in found if one[0] == "f"] == [
        ("chunk", {"prompt": 1}),
        ("chunk", [8]),
        ("chunk", [9]),
        ("chunk", [10]),
        ("done", {"finish": "length", "tokens": 3}),
    ]
    stage.at_rest(rig)


def test_a_priority_that_cannot_be_ordered_and_a_token_that_is_none_fail_their_requests_alone() -> None:
    stage = Stage(policy="priority")
    with running(stage.engine) as rig:
        for name, priority in (("a", "first"), ("b", None), ("c", float("nan")), ("d", [1])):
            rig.start(name, {"tokens": [7], "priority": priority})
        rig.start("e", {"tokens": [7], "stop_token_ids": [9999]})
        rig.start("f", {"tokens": [7]})
        found = rig.outbox.several(10)
    assert [one[0] for one in found if one[1] == "failed"] == list("abcde")
    assert {one[2].partition(":")[0] for one in found if one[1] == "failed"} == {"InvalidRequest"}
    assert [one[1] for one in found if one[0] == "f"] == ["chunk"] * 4 + ["done"]
    stage.at_rest(rig)


def test_a_stage_with_one_engine_takes_a_pin_and_its_own_rank_alone() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        rig.start("own", {"tokens": [1], "data_parallel_rank": 0})
        rig.start("other", {"tokens": [1], "data_parallel_rank": 1})
        outputs = {one[0]: one[1:] for one in rig.outbox.several(6)}
        assert outputs["other"] == ("failed", "InvalidRequest: data_parallel_rank is 1; the only engine is 0")
        assert outputs["own"][0] == "done"
    stage.at_rest(rig)


def test_a_deliver_that_raises_fails_its_request_alone() -> None:
    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        if payload.data.get("raises") == generation.completion_tokens:
            raise ValueError("cannot say that")
        yield from collect(payload, generation)

    stage = Stage(deliver)
    with running(stage.engine) as rig:
        for name, raises in (("a", 0), ("b", 2), ("c", 3), ("d", None)):
            rig.start(name, {"tokens": [7], "raises": raises})
        ends = [one for one in rig.outbox.several(1 + 3 + 4 + 5) if one[1] != "chunk"]
    assert sorted(one[:2] for one in ends) == [("a", "failed"), ("b", "failed"), ("c", "failed"), ("d", "done")]
    stage.at_rest(rig)


def test_a_failed_row_is_a_failed_request() -> None:
    stage = Stage()
    stage.executor.row_errors = {"a": "the model's logits are not finite"}
    with running(stage.engine) as rig:
        rig.start("a", {"tokens": [7]})
        assert rig.outbox.several(2)[1] == ("a", "failed", "RequestError: the model's logits are not finite")
    stage.at_rest(rig)


def test_deltas_for_a_reader_that_lags_are_joined_until_its_gate_opens() -> None:
    stage = Stage()
    held = gate()
    with running(stage.engine) as rig:
        rig.outbox.gates = [held]
        rig.start("a", {"tokens": [7], "max_tokens": 6})
        assert rig.outbox.next() == ("a", "chunk", {"prompt": 1})
        rig.start("b", {"tokens": [40]})
        assert [one[0] for one in rig.outbox.several(5)] == ["b"] * 5  # nobody waits for the reader of a
        held.set_result(None)
        rest = rig.outbox.several(2)
        while rest[-1][1] != "done":
            rest.append(rig.outbox.next())
    assert [token for one in rest[:-1] for token in one[2]] == [8, 9, 10, 11, 12, 13]
    assert rest[-1] == ("a", "done", {"finish": "length", "tokens": 6})
    assert len(rest[0][2]) > 1
    stage.at_rest(rig)


def test_all_that_a_step_gives_leaves_together() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        rig.start("a", {"tokens": [7], "max_tokens": 3, "n": 2})
        rig.inbox.close()
    assert rig.outbox.together_counts[:2] == [2, 2], "a chunk of each answer"
    assert sum(rig.outbox.together_counts) == rig.outbox.outputs.qsize() - 1, "all but the first, of the prompt"


def test_an_engine_that_ends_waits_for_readers_that_lag() -> None:
    stage = Stage()
    held = gate()
    with running(stage.engine) as rig:
        rig.outbox.gates = [held]
        rig.start("a", {"tokens": [7], "max_tokens": 2})
        rig.outbox.next()
        rig.inbox.close()
        threading.Timer(0, held.set_result, [None]).start()
        outputs = [rig.outbox.next()]
        while outputs[-1][1] == "chunk":
            outputs.append(rig.outbox.next())
    assert [token for one in outputs[:-1] for token in one[2]] == [8, 9]
    assert outputs[-1] == ("a", "done", {"finish": "length", "tokens": 2})


class GatedTokenizer:
    """Encodes long texts only when ``gate`` is set; one token a character."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = threading.Semaphore(0)

    def __deepcopy__(self, memo: object) -> GatedTokenizer:
        return self

    def __call__(self, text: str) -> dict[str, list[int]]:
        if len(text) > 100:
            self.asked.release()
            assert self.gate.wait(100)
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


def test_a_long_text_is_encoded_while_other_requests_are_computed_and_refused_if_it_is_too_long() -> None:
    def text(payload: omni.StagePayload) -> omni.Prompt:
        return omni.Prompt(text=payload.data, params={"max_tokens": 3, "temperature": 0})

    tokenizer = GatedTokenizer()
    core = scripted_core(ScriptedExecutor(), blocks=2600, max_model_len=9_000)
    spec = omni.Autoregressive(model="", prompt=text, deliver=deliver_text, params={"temperature": 0})
    with running(AutoregressiveEngine(spec, core, tokenizer, None)) as rig:
        rig.start("long", "a" * 100_000)
        assert tokenizer.asked.acquire(timeout=100)
        rig.start("fits", "a" * 8_500)
        rig.start("aborted", "a" * 8_500)
        for name in "bcd":
            rig.start(name, name)
        assert sorted(rig.outbox.several(3)) == [("b", "done", "cde"), ("c", "done", "def"), ("d", "done", "efg")]
        rig.abort("aborted")
        tokenizer.gate.set()
        assert rig.outbox.next() == (
            "long",
            "failed",
            "ContextLengthExceeded: " + str(ContextLengthExceeded(100_000, 9000)),
        )
        assert rig.outbox.next() == ("fits", "done", "bcd")
    assert core.scheduler.pool.free == core.scheduler.pool.capacity


def test_a_long_grammar_is_compiled_while_other_requests_are_computed() -> None:
    def formed(payload: omni.StagePayload) -> omni.Prompt:
        schema = {"type": "json_schema", "json_schema": {"schema": {"title": "x" * payload.data}}}
        form = {"response_format": schema} if payload.data else {}
        return omni.Prompt(tokens=[7], params={"max_tokens": 3, "temperature": 0, **form})

    def compile(grammar: Any) -> Any:
        assert released.wait(100)
        raise ValueError("no grammar")

    released = threading.Event()
    scheduler = Scheduler(SchedulerLimits(), BlockPool(64))
    core = EngineCore(scheduler, ScriptedExecutor(), ModelFacts(VOCABULARY, grammars=compile))
    spec = omni.Autoregressive(model="", prompt=formed, deliver=collect, params={"temperature": 0})
    with running(AutoregressiveEngine(spec, core, tiny_tokenizer(), None)) as rig:
        rig.start("long", 5000)
        rig.start("free", 0)
        outputs = [rig.outbox.next()]
        while outputs[-1][1] == "chunk":
            outputs.append(rig.outbox.next())
        assert {one[0] for one in outputs} == {"free"}
        released.set()
        assert rig.outbox.next() == ("long", "failed", "InvalidRequest: no grammar")


def test_an_aborted_request_is_computed_no_further_and_its_id_may_come_again() -> None:
    stage = Stage(max_requests=2)
    computed: list[tuple[str, int]] = []
    with running(stage.engine) as rig:

        def abort(step: Any) -> None:
            computed.extend((row.request.id, row.start) for row in step.rows)
            if any((row.request.id, row.start) == ("a", 3) for row in step.rows):
                rig.abort("a")

        stage.executor.during = abort
        rig.start("a", {"tokens": [7], "max_tokens": 50})
        rig.start("b", {"tokens": [40], "max_tokens": 8})
        outputs = [rig.outbox.next()]
        while outputs[-1][:2] != ("b", "done"):
            outputs.append(rig.outbox.next())
        del rig.works["a"]
        rig.start("a", {"tokens": [90], "max_tokens": 1})
        again = rig.outbox.several(3)
    assert [one[2] for one in outputs if one[0] == "a"][1:] == [[8], [9], [10]]
    assert max(start for name, start in computed if name == "a") == 3
    assert [one[1:] for one in again] == [
        ("chunk", {"prompt": 1}),
        ("chunk", [91]),
        ("done", {"finish": "length", "tokens": 1}),
    ]
    stage.at_rest(rig)


def test_the_steps_of_a_request_are_recorded_as_scheduler_events() -> None:
    recorded: list[tuple[str, str, dict[str, Any]]] = []

    class Context:
        terminal = True

        def emit(self, event: str, request_id: str, **metadata: Any) -> None:
            recorded.append((request_id, event, metadata))

    context: Any = Context()
    spec = omni.Autoregressive(model="", prompt=prompt, deliver=deliver_text, params=GREEDY)
    engine = AutoregressiveEngine(spec, scripted_core(ScriptedExecutor()), tiny_tokenizer(), context)
    with running(engine) as rig:
        for name in "ab":
            rig.start(name, {"tokens": [7] * 9})
            assert rig.outbox.next()[:2] == (name, "done")
    for name, cached in (("a", 0), ("b", 8)):
        assert [(event, metadata) for one, event, metadata in recorded if one == name] == [
            ("scheduler_request_build_start", {}),
            ("scheduler_request_build_end", {}),
            ("scheduler_queue_enter", {"prompt_tokens": 9}),
            ("scheduler_prefill_start", {"cached_tokens": cached}),
            ("scheduler_first_emit", {}),
        ]


def test_chunks_are_refused_and_the_engine_reports_what_it_does() -> None:
    stage = Stage()
    with running(stage.engine) as rig:
        rig.chunk("a", {"tokens": [7]})
        assert rig.outbox.next()[:2] == ("a", "failed")
        rig.start("b", {"tokens": [1] * 9})
        rig.outbox.several(5)
        rig.start("c", {"tokens": [1] * 9})
        rig.outbox.several(5)
        assert rig.outbox.began_ids == ["b", "c"]
    assert set(rig.inbox.gauges) == set(catalog.ENGINE)
    assert rig.inbox.gauges == {
        "waiting": 0,
        "running": 0,
        "kv_blocks": 63,
        "kv_blocks_used": 0,
        "kv_blocks_cached": 2,
        "steps_total": 6,
        "preemptions_total": 0,
        "prompt_tokens_total": 18,
        "prefix_hit_tokens_total": 8,
        "generated_tokens_total": 6,
    }


def test_the_prefix_cache_is_forgotten_on_request_and_other_operations_are_refused_by_name() -> None:
    stage = Stage()
    replies: SimpleQueue[Any] = SimpleQueue()

    def ask(operation: str, arguments: dict[str, Any]) -> Any:
        rig.inbox.put(events.Admin("call", operation, arguments, replies.put))
        return replies.get(timeout=PATIENCE_S)

    with running(stage.engine) as rig:
        rig.start("a", {"tokens": [1] * 9})
        rig.outbox.several(5)
        assert ask("reset_prefix_cache", {}) == 2
        assert ask("reset_prefix_cache", {}) == 0
        assert "there is reset_prefix_cache" in str(ask("sleep", {}))
        assert "no arguments" in str(ask("reset_prefix_cache", {"all": True}))
        rig.start("b", {"tokens": [1] * 9})
        rig.outbox.several(5)
    assert rig.inbox.gauges["prefix_hit_tokens_total"] == 0
