"""Other engines under the stage: what is refused, and their client with a pipeline of a few lines. The real one: see
`test_external_openvino`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines.autoregressive.external import gguf_file
from stage_runtime.engines.autoregressive.external.openvino import OpenVINOClient
from stage_runtime.engines.autoregressive.stage.process_engine import ProcessEngine
from stage_runtime.engines.making import loading
from stage_runtime.errors import ConfigurationError, EngineDeadError
from stage_runtime.rules.autoregressive import requests
from tests.engines import external_kit
from tests.engines.engine_kit import PATIENCE_S, running
from tests.engines.external_kit import ends
from tests.engines.generation_kit import CONFIGS, tiny_model, tiny_tokenizer


class Status(Enum):
    RUNNING = 0
    FINISHED = 1
    IGNORED = 2


class FinishReason(Enum):
    NONE = 0
    STOP = 1
    LENGTH = 2


class Handle:
    """The handle of one request: the next token is the last one plus one."""

    def __init__(self, prompt: Sequence[int], config: Any) -> None:
        self.config = config
        self.tokens = list(prompt)
        self.left: int = config.max_new_tokens
        self.status = Status.RUNNING
        self.parts: list[Any] = []
        self.cancelled = False

    def get_status(self) -> Status:
        return self.status

    def can_read(self) -> bool:
        return bool(self.parts)

    def read(self) -> dict[int, Any]:
        return {0: self.parts.pop(0)}

    def cancel(self) -> None:
        self.cancelled = True

    def advance(self) -> None:
        self.tokens.append(self.tokens[-1] + 1)
        self.left -= 1
        stopped = self.tokens[-1] in self.config.stop_token_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH if not self.left else FinishReason.NONE
        self.parts.append(SimpleNamespace(generated_ids=self.tokens[-1:], finish_reason=reason))
        if reason is not FinishReason.NONE:
            self.status = Status.FINISHED


class Config:
    """The wishes of a request, as in openvino-genai."""

    min_new_tokens: int
    max_new_tokens: int
    do_sample: bool
    top_p: float

    def __init__(self) -> None:
        self.stop_token_ids: set[int] = set()
        self.ignore_eos = False

    def set_eos_token_id(self, token: int) -> None:
        self.eos_token_id = token


class Pipeline:
    """A pipeline like openvino-genai's. A prompt's first token says what becomes of it."""

    REFUSED, BREAKS, TOO_LARGE, NEVER_FITS, ENDLESS = 900, 901, 902, 903, 904

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.most = 0  #: Requests at once.
        self.added: list[Config] = []

    def add_request(self, number: int, prompt: list[int], config: Config) -> Handle:
        if prompt[0] == self.REFUSED:
            raise RuntimeError("no such request")
        if config.min_new_tokens > config.max_new_tokens or (config.do_sample and not config.top_p > 0):
            raise RuntimeError("as openvino-genai's GenerationConfig.validate")
        self.added.append(config)
        self.handles.append(Handle(prompt, config))
        self.most = max(self.most, len(self.handles))
        return self.handles[-1]

    def has_non_finished_requests(self) -> bool:
        return bool(self.handles)

    def step(self) -> None:
        self.scheduled = [one for one in self.handles if one.tokens[0] != self.NEVER_FITS]
        for handle in self.scheduled:
            if handle.tokens[0] == self.BREAKS:
                raise RuntimeError("the step broke")
            if handle.tokens[0] == self.TOO_LARGE and len(handle.tokens) > 3:
                handle.status = Status.IGNORED
            elif handle.tokens[0] == self.ENDLESS:
                handle.parts.append(SimpleNamespace(generated_ids=[1], finish_reason=FinishReason.NONE))
            else:
                handle.advance()
        self.handles = [one for one in self.handles if one.status is Status.RUNNING and not one.cancelled]

    def get_metrics(self) -> Any:
        return SimpleNamespace(scheduled_requests=len(self.scheduled))


PACKAGE = SimpleNamespace(GenerationStatus=Status, GenerationFinishReason=FinishReason, GenerationConfig=Config)


def engine(pipeline: Pipeline, **facts: Any) -> ProcessEngine:
    facts = {"vocab_size": 100_000, "longest": 50_000, **facts}
    return external_kit.engine(OpenVINOClient(PACKAGE, pipeline, tensor=list, **facts))


def test_requests_are_answered_and_end_by_length_or_by_a_stop_token() -> None:
    pipeline = Pipeline()
    with running(engine(pipeline, end_ids=frozenset({50}))) as rig:
        rig.start("length", {"tokens": [1]})
        rig.start("end", {"tokens": [48]})
        rig.start("ignored", {"tokens": [48], "params": {"ignore_eos": True}})
        rig.start("stopped", {"tokens": [58], "params": {"stop_token_ids": [59]}})
        assert ends(rig, 4) == {
            "length": ("done", ["length", 5]),
            "end": ("done", ["stop", 2]),
            "ignored": ("done", ["length", 5]),
            "stopped": ("done", ["stop", 1]),
        }
    assert rig.crash is None


def test_a_probability_of_0_and_more_tokens_than_there_is_room_for_are_no_errors() -> None:
    with running(engine(Pipeline(), longest=4)) as rig:
        rig.start("one", {"tokens": [1], "params": {"temperature": 1, "top_p": 0, "min_tokens": 5}})
        assert ends(rig, 1) == {"one": ("done", ["length", 3])}


def test_an_error_of_one_request_ends_it_alone() -> None:
    with running(engine(Pipeline())) as rig:
        for name, first in (("refused", Pipeline.REFUSED), ("large", Pipeline.TOO_LARGE), ("good", 1)):
            rig.start(name, {"tokens": [first]})
        rig.start("field", {"tokens": [1], "params": {"seed": 7}})
        rig.start("long", {"tokens": [1] * 50_000})
        found = ends(rig, 5)
        assert found["good"] == ("done", ["length", 5])
        assert "no such request" in found["refused"][1]
        assert "no room" in found["large"][1]
        assert found["field"] == (
            "failed",
            "InvalidRequest: seed: the engine openvino of this stage does not compute it",
        )
        assert "your messages resulted in 50000 tokens" in found["long"][1]


def test_a_request_that_never_fits_ends_instead_of_stalling_the_engine() -> None:
    with running(engine(Pipeline())) as rig:
        rig.start("never", {"tokens": [Pipeline.NEVER_FITS]})
        assert "no room" in ends(rig, 1)["never"][1]
        rig.start("next", {"tokens": [1]})
        assert ends(rig, 1) == {"next": ("done", ["length", 5])}


def test_an_aborted_request_is_cancelled_in_the_pipeline() -> None:
    pipeline = Pipeline()
    with running(engine(pipeline)) as rig:
        rig.start("first", {"tokens": [Pipeline.ENDLESS]})
        assert rig.outbox.next() == ("first", "chunk", "begins")
        rig.abort("first")
        rig.start("second", {"tokens": [1]})
        assert ends(rig, 1) == {"second": ("done", ["length", 5])}
    assert rig.inbox.gauges["running"] == rig.inbox.gauges["waiting"] == 0
    assert not pipeline.handles


@pytest.mark.parametrize("data", [{"params": {"stop": ["b"]}}, {"raises": True}])
def test_tokens_that_come_after_an_answer_s_end_go_to_no_later_request_of_its_id(data: dict[str, Any]) -> None:
    """The engine learns later of an end that the stage has found: a stop string, an author's error."""
    client = external_kit.Dictated()
    [stop] = tiny_tokenizer()("b")["input_ids"]
    with running(external_kit.engine(client)) as rig:
        rig.start("one", {"tokens": [1], **data})
        first = client.added.get(timeout=PATIENCE_S)
        client.says(first, [stop])
        assert ends(rig, 1)["one"][0] in ("done", "failed")
        del rig.works["one"]
        rig.start("one", {"tokens": [1]})
        second = client.added.get(timeout=PATIENCE_S)
        client.says(first, [stop, stop])
        client.says(second, [stop], requests.FinishReason.LENGTH)
        assert ends(rig, 1) == {"one": ("done", ["length", 1])}


def test_a_step_that_raises_ends_the_engine_and_every_request() -> None:
    with pytest.raises(EngineDeadError, match="the step broke"), running(engine(Pipeline())) as rig:
        rig.start("one", {"tokens": [Pipeline.ENDLESS]})
        assert rig.outbox.next() == ("one", "chunk", "begins")
        rig.start("breaks", {"tokens": [Pipeline.BREAKS]})


def test_what_is_under_way_is_finished_when_the_stage_ends() -> None:
    with running(engine(Pipeline())) as rig:
        rig.start("one", {"tokens": [1], "params": {"max_tokens": 2_000}})
        rig.inbox.close()
        assert ends(rig, 1) == {"one": ("done", ["length", 2_000])}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine": "llama.cpp"}, "engine='llama.cpp'"),
        ({"engine": "openvino", "linears": "mkl"}, "takes no linears"),
        ({"engine": "openvino", "data_parallel_size": 2}, "takes no data_parallel_size"),
        ({"engine": "openvino", "policy": "priority"}, "takes no policy"),
    ],
)
def test_a_setting_that_the_engine_does_not_take_is_refused_when_the_stage_is_loaded(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        loading.as_engine(omni.Autoregressive(model="", **settings))


@pytest.mark.parametrize(("name", "package"), [("openvino", "openvino_genai")])
def test_without_its_package_one_line_says_how_to_install_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'omnipipeline\[{name}\]'"):
        loading.as_engine(omni.Autoregressive(model="", engine=name))


def test_each_tensor_of_a_model_has_another_name_in_the_file() -> None:
    for kind in ("llama", "qwen2", "qwen3"):
        tensors = list(tiny_model(kind).state_dict())
        assert len({gguf_file.name_of(one) for one in tensors}) == len(tensors)
    with pytest.raises(ConfigurationError, match=r"transformer\.wte"):
        gguf_file.name_of("transformer.wte.weight")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("llama", None), ("qwen2", None), ("qwen3", None), ("mistral", "sliding window"), ("gpt2", "'gpt2'"),
     ("gemma2", "'gemma2'")],
)  # fmt: skip
def test_a_model_that_the_file_cannot_express_is_refused(kind: str, problem: str | None) -> None:
    if problem is None:
        assert gguf_file.check(CONFIGS[kind]())
    else:
        with pytest.raises(ConfigurationError, match=problem):
            gguf_file.check(CONFIGS[kind]())
