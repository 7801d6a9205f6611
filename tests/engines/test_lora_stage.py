"""Stages with adapters: who chooses one, and engines in processes of their own, also those that start later."""

from __future__ import annotations

import os
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.making import loading
from stage_runtime.metrics import catalog, planes
from tests.engines.engine_kit import PATIENCE_S, Rig, running
from tests.engines.generation_kit import alone_with, tiny_model, tiny_tokenizer
from tests.engines.lora_kit import adapter, merged

TOKENS = [7, 99, 3, 120, 54, 8, 91, 30, 2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    adapter(folder / "one")
    adapter(folder / "two", seed=2)
    return folder


def spec(checkpoint: Path, **settings: Any) -> omni.Autoregressive:
    def prompt(payload: omni.StagePayload) -> omni.Prompt:
        return omni.Prompt(tokens=TOKENS, params=payload.request.params, adapter=payload.request.inputs)

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Any:
        if generation.tokens:
            yield omni.Chunk(list(generation.tokens))

    return omni.Autoregressive(
        model=str(checkpoint / "model"),
        prompt=prompt,
        deliver=deliver,
        params={"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        threads=1,
        **settings,
    )


def expected(checkpoint: Path, name: str = "") -> list[int]:
    model = merged("llama", str(checkpoint / name)) if name else tiny_model("llama")
    return alone_with(model, TOKENS, 8)


def ask(rig: Rig, name: str, model: str = "", adapter: str | None = None) -> Any:
    """The tokens of the answer, or the error."""
    rig.ask(omni.OmniRequest(id=name, kind="pipeline", inputs=adapter, model=model))
    tokens: list[int] = []
    while True:
        request_id, kind, *data = rig.outbox.next()
        assert request_id == name
        if kind == "chunk":
            tokens += data[0]
        else:
            return tokens if kind == "done" else data[0]


def operate(rig: Rig, operation: str, **arguments: Any) -> Any:
    replies: SimpleQueue[Any] = SimpleQueue()
    rig.inbox.put(events.Admin("call", operation, arguments, replies.put))
    return replies.get(timeout=PATIENCE_S)


def test_an_author_s_prompt_chooses_before_the_client_s_model(checkpoint: Path) -> None:
    listed = {"lora_modules": {name: str(checkpoint / name) for name in ("one", "two")}}
    one, two, base = (expected(checkpoint, name) for name in ("one", "two", ""))
    with running(loading.as_engine(spec(checkpoint, **listed))) as rig:
        assert ask(rig, "a", model="one") == one
        assert ask(rig, "b", model="one", adapter="two") == two
        assert ask(rig, "c", model="one", adapter="") == base
        assert ask(rig, "d", model=str(checkpoint / "model")) == base
        assert "RequestError: model: no adapter 'three' is loaded here; loaded: one, two" in ask(rig, "e", "three")
        gauges = dict(rig.inbox.gauges)
    assert set(gauges) - set(catalog.ENGINE) == {
        "adapters",
        "adapter_bytes",
        "adapter_requests_total.one",
        "adapter_requests_total.two",
    }
    assert gauges["adapters"] == 2 and gauges["adapter_requests_total.one"] == 1
    with running(loading.as_engine(spec(checkpoint))) as rig:
        assert ask(rig, "a", model="one") == base  # a stage without adapters takes any model's name for its own
        assert "adapter: this engine takes no adapters" in ask(rig, "b", adapter="one")


def test_every_engine_process_has_what_is_loaded_and_so_has_one_that_starts_later(checkpoint: Path) -> None:
    settings = {"lora_modules": {"one": str(checkpoint / "one")}, "max_loras": 2, "data_parallel_size": 2}
    two = expected(checkpoint, "two")
    with running(loading.as_engine(spec(checkpoint, **settings))) as rig:
        assert [ask(rig, f"a{turn}", model="one") for turn in range(2)] == [expected(checkpoint, "one")] * 2
        assert "model: no adapter 'two' is loaded here" in ask(rig, "b", model="two")
        wrong = operate(rig, "load_adapter", name="two", path=str(checkpoint / "nowhere"))
        assert "nowhere: this folder does not exist" in str(wrong)
        assert operate(rig, "load_adapter", name="two", path=str(checkpoint / "two")) == ["one", "two"]
        assert operate(rig, "unload_adapter", name="one") == ["two"]
        assert operate(rig, "scale_engines", engines=3) == 3
        assert operate(rig, "list_adapters") == {"two": str(checkpoint / "two")}
        assert [ask(rig, f"c{turn}", model="two") for turn in range(3)] == [two] * 3
        assert "no adapter 'one' is loaded here" in ask(rig, "d", model="one")
        assert "no adapter 'one'; loaded: two" in str(operate(rig, "unload_adapter", name="one"))
        assert operate(rig, "load_adapter", name="again", path=str(checkpoint / "one")) == ["again", "two"]


@pytest.mark.parametrize("where", [{}, {"own_process": True}], ids=["thread", "process"])
def test_steps_go_on_while_an_adapter_is_read(checkpoint: Path, tmp_path: Path, where: dict[str, bool]) -> None:
    slow = Path(adapter(tmp_path / "slow", seed=2))
    config = (slow / "adapter_config.json").read_bytes()
    (slow / "adapter_config.json").unlink()
    os.mkfifo(slow / "adapter_config.json")  # to be read when somebody writes
    one = expected(checkpoint, "one")
    replies: SimpleQueue[Any] = SimpleQueue()
    folders = [str(tmp_path), str(checkpoint)]
    settings = {"lora_modules": {"one": str(checkpoint / "one")}, "lora_folders": folders, "max_loras": 2, **where}
    with running(loading.as_engine(spec(checkpoint, **settings))) as rig:
        rig.inbox.put(events.Admin("c", "load_adapter", {"name": "two", "path": str(slow)}, replies.put))
        assert [ask(rig, f"a{turn}", model="one") for turn in range(3)] == [one] * 3
        assert "model: the adapter 'two' is being loaded" in ask(rig, "b", model="two")
        assert "'two' is being loaded" in str(operate(rig, "unload_adapter", name="two"))
        again = operate(rig, "load_adapter", name="two", path=str(checkpoint / "two"))
        assert "adapter 'two' is being loaded" in str(again)
        assert "max_loras=2 are loaded" in str(operate(rig, "load_adapter", name="x", path=str(checkpoint / "two")))
        assert replies.empty()
        (slow / "adapter_config.json").write_bytes(config)
        assert replies.get(timeout=PATIENCE_S) == ["one", "two"]
        assert ask(rig, "c", model="two") == expected(checkpoint, "two")


def test_the_pipeline_has_the_adapters_that_all_engines_of_all_its_stages_have() -> None:
    def beat(**engines: list[str]) -> dict[str, float]:
        values = {
            stage: {"adapters": len(names), **{f"adapter_requests_total.{name}": 0 for name in names}}
            for stage, names in engines.items()
        }
        return planes.gauges(relays={}, transfers_in_flight=0, sends_queued=0, events={}, engines=values)

    plain = planes.gauges(relays={}, transfers_in_flight=0, sends_queued=0, events={}, engines={"c": {"waiting": 1}})
    assert planes.adapters([]) is None and planes.adapters([plain]) is None
    assert planes.adapters([beat(a=[])]) == frozenset()
    assert planes.adapters([beat(a=["x", "org/y.2"]), plain]) == frozenset({"x", "org/y.2"})
    assert planes.adapters([beat(a=["x", "y"]), beat(a=["y", "z"])]) == frozenset({"y"})
    assert planes.adapters([beat(a=["x", "y"], b=["x"])]) == frozenset({"x"})
    shown = planes.samples({"p": beat(a=["org/y.2"])})[catalog.LORA["adapter_requests_total"]]
    assert shown == {("p", "a", "org/y.2"): 0.0}
