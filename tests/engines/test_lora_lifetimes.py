"""Adapters that are loaded and dropped while requests are computed, their blocks in the cache, and their bounds."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, cast

import pytest

import stage_runtime as omni
from stage_runtime.engines.autoregressive.core import engine_operations
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.loading import adapting
from stage_runtime.engines.autoregressive.lora.settings import checked
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.tensor_parallel import ranks
from stage_runtime.engines.events import Admin
from stage_runtime.errors import ConfigurationError, RequestError
from tests.engines.generation_kit import GREEDY, VOCABULARY, Answers, alone, alone_with, tiny_model
from tests.engines.kv_pair_kit import Pair
from tests.engines.lora_kit import adapter, merged
from tests.engines.rank_threads import Meeting, ThreadRanks, ranked
from tests.patience import patience

PATIENCE_S = patience(100.0)
PROMPT = [random.Random(3).randrange(VOCABULARY) for _ in range(22)]


def answer(core: EngineCore, name: str, prompt: list[int] = PROMPT, **others: Any) -> list[int]:
    answers = Answers(core)
    answers.ask("a", prompt, adapter=name, **others)
    answers.run()
    return answers.tokens["a"]


def carried_out(core: EngineCore, operation: str, **arguments: Any) -> Any:
    replies: list[Any] = []
    engine_operations.carry_out(Admin("c", operation, arguments, replies.append), core)
    return replies[0]


def test_blocks_are_those_of_an_adapter_and_of_its_files(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "1"), adapter(tmp_path / "2", seed=2)
    expected = {name: alone_with(merged("llama", path), PROMPT, 12) for name, path in (("one", one), ("two", two))}
    with ranked("llama", 1, lora_modules={"one": one}, max_loras=2) as core:
        hits = core.scheduler.stats
        assert answer(core, "") == alone("llama", PROMPT, 12) and hits.hit_tokens == 0
        assert answer(core, "one") == expected["one"] and hits.hit_tokens == 0
        assert answer(core, "one", cache_salt="s") == expected["one"] and hits.hit_tokens == 0
        assert answer(core, "one") == expected["one"] and (found := hits.hit_tokens) == 20
        assert engine_operations.unload_adapter(core, "one") == []
        assert engine_operations.load_adapter(core, "one", two) == ["one"]  # other files by the same name
        assert answer(core, "one") == expected["two"] and hits.hit_tokens == found
        assert engine_operations.load_adapter(core, "again", one) == ["again", "one"]  # the same files by another one
        assert answer(core, "again") == expected["one"] and hits.hit_tokens == 2 * found
        assert answer(core, "") == alone("llama", PROMPT, 12) and hits.hit_tokens == 3 * found


def test_requests_under_way_keep_an_adapter_that_is_unloaded(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    with ranked("llama", 1, lora_modules={"one": folder}) as core:
        assert core.adapters is not None
        answers = Answers(core)
        answers.ask("a", PROMPT, adapter="one")
        late = EngineCoreRequest(request_id="late", prompt_token_ids=PROMPT, params=GREEDY, adapter="one")
        prepared = core.preprocess_add_request(late)
        answers.step()
        assert carried_out(core, "unload_adapter", name="one") == []
        assert core.adapters.gauges()["adapters"] == 1 and core.adapters.gauges()["adapter_bytes"] > 0
        with pytest.raises(RequestError, match="no adapter 'one' is loaded here; loaded: none") as refused:
            answers.ask("b", PROMPT, adapter="one")
        assert (refused.value.code, refused.value.param) == ("not_found", "model")
        full = carried_out(core, "load_adapter", name="two", path=folder)
        assert str(full) == "load_adapter: max_loras=1 are loaded, 1 of them until their requests end"
        answers.run()
        assert answers.tokens["a"] == alone_with(merged("llama", folder), PROMPT, 12)
        assert core.adapters.gauges() == {"adapters": 0, "adapter_bytes": 0}
        with pytest.raises(RequestError, match="the adapter 'one' was unloaded"):
            core.add_request(late, prepared)
        assert carried_out(core, "load_adapter", name="two", path=folder) == ["two"]


def test_the_weights_of_an_unloaded_adapter_go_with_its_last_aborted_request(tmp_path: Path) -> None:
    with ranked("llama", 1, lora_modules={"one": adapter(tmp_path)}) as core:
        assert core.adapters is not None
        answers = Answers(core)
        answers.ask("a", PROMPT, adapter="one")
        answers.step()
        carried_out(core, "unload_adapter", name="one")
        core.abort_requests(["a"])
        assert core.adapters.gauges() == {"adapters": 0, "adapter_bytes": 0}


def test_operations_that_cannot_be_carried_out_change_nothing(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "1")
    with ranked("llama", 1, lora_modules={"one": folder}, max_loras=2) as core:
        for arguments, problem in (
            ({"name": "one", "path": folder}, "load_adapter: an adapter 'one' is loaded: unload it first"),
            ({"name": "a b", "path": folder}, "load_adapter: an adapter's name is 1 to 128 characters"),
            ({"name": "two", "path": 7}, "load_adapter: expected the path of a folder"),
            ({"name": "two", "path": str(tmp_path / "no")}, "load_adapter: "),
            ({"name": "two"}, "load_adapter takes name and path"),
        ):
            assert problem in str(carried_out(core, "load_adapter", **arguments))
        assert "no adapter 'two'; loaded: one" in str(carried_out(core, "unload_adapter", name="two"))
        assert carried_out(core, "list_adapters") == {"one": folder}
        assert core.adapters is not None and core.adapters.gauges()["adapters"] == 1
    with ranked("llama", 1) as plain:
        assert "this stage takes no adapters" in str(carried_out(plain, "load_adapter", name="one", path=folder))
        with pytest.raises(ValueError, match="adapter: this engine takes no adapters"):
            answer(plain, "one")


def test_without_lora_folders_adapters_of_run_time_lie_beside_those_of_the_stage(tmp_path: Path) -> None:
    listed, beside = adapter(tmp_path / "listed" / "one"), adapter(tmp_path / "listed" / "two", seed=2)
    elsewhere = adapter(tmp_path / "elsewhere")
    (tmp_path / "listed" / "link").symlink_to(elsewhere)
    with ranked("llama", 1, lora_modules={"one": listed}, max_loras=3) as core:
        for path in (elsewhere, f"{tmp_path}/listed/link", f"{tmp_path}/listed/../elsewhere", "/"):
            assert str(carried_out(core, "load_adapter", name="two", path=path)) == (
                f"load_adapter: {path}: adapters are loaded from {tmp_path}/listed, beside those of lora_modules, "
                "unless lora_folders is set"
            )
        assert carried_out(core, "load_adapter", name="two", path=beside) == ["one", "two"]
    with ranked("llama", 1, max_loras=1) as core:
        refused = carried_out(core, "load_adapter", name="one", path=listed)
        assert "adapters are loaded from no folder, beside those of lora_modules, unless lora_folders is" in str(
            refused
        )
        assert core.adapters is not None and core.adapters.gauges()["adapters"] == 0


def test_an_adapter_in_the_root_does_not_open_all_folders(tmp_path: Path) -> None:
    settings = checked(omni.Autoregressive(model="m", lora_modules={"a": "/one", "b": f"{tmp_path}/b/", "c": "/"}))
    assert settings is not None and settings.outside("/etc") is not None and settings.outside("/") is not None
    assert settings.outside(f"{tmp_path}/two") is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lora_modules": []}, "(lora_modules=[]): expected folders by names"),
        ({"lora_modules": {"a b": "/x"}}, "an adapter's name is 1 to 128 characters"),
        ({"lora_modules": {"m": "/x"}}, "this is the name of the model"),
        ({"lora_modules": {"a": ""}}, "expected the path of a folder"),
        ({"lora_modules": {"a": "/x", "b": "/y"}, "max_loras": 1}, "(max_loras=1): lora_modules has 2, of 1 at most"),
        ({"max_loras": 65}, "(max_loras=65): from 0 to 64"),
        ({"max_loras": True}, "(max_loras=True): from 0 to 64"),
        ({"max_lora_rank": 0}, "(max_lora_rank=0): from 1 to 512"),
        ({"max_loras": 1, "engine": "vllm"}, "(engine='vllm'): adapters are for engine='own'"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        checked(omni.Autoregressive(model="m", **settings))
    assert problem in str(refused.value)


def test_a_stage_whose_adapter_cannot_be_loaded_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"lora_modules=\{'one': …\}\): .*use_dora=True: DoRA"):
        ranked("llama", 1, lora_modules={"one": adapter(tmp_path, use_dora=True)}).__enter__()


def test_as_much_memory_is_kept_free_as_the_largest_adapters_take(tmp_path: Path) -> None:
    model = tiny_model("llama")
    planned = adapting.planned(omni.Autoregressive(model="m", max_loras=3, max_lora_rank=4), model)
    assert planned is not None
    layers = planned.layers(PagedModel(model), None)
    assert planned.nbytes == 3 * layers.read(adapter(tmp_path, rank=4)).facts.nbytes


def test_prefill_computes_with_the_same_files_or_declines(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "1"), adapter(tmp_path / "2", seed=2)
    expected = alone_with(merged("llama", one), PROMPT, 12)
    with (
        ranked("llama", 1, lora_modules={"one": one}) as decode,
        ranked("llama", 1, lora_modules={"one": one}) as prefill,
    ):
        pair = Pair("llama", cores=(decode, prefill))
        pair.d.ask("a", PROMPT, adapter="one")
        pair.run()
        assert pair.d.tokens["a"] == expected
        received = pair.d.engine.kv.gauges()["kv_received_blocks_total"]  # type: ignore[union-attr]
        assert received > 0
        decode.scheduler.pool.forget_all()
        engine_operations.unload_adapter(prefill, "one")
        pair.d.ask("b", PROMPT, adapter="one")
        pair.run()
        assert pair.d.tokens["b"] == expected
        engine_operations.load_adapter(prefill, "one", two)
        decode.scheduler.pool.forget_all()
        pair.d.ask("c", PROMPT, adapter="one")
        pair.run()
        assert pair.d.tokens["c"] == expected
        reasons = [reason for _room, reason in pair.prefill.closes if reason]
        assert ["no adapter 'one' is loaded here" in reasons[0], "has other files" in reasons[1]] == [True, True]
        assert pair.d.engine.kv.gauges()["kv_received_blocks_total"] == received  # type: ignore[union-attr]


class _Full:
    """The part of a rank's runner that adapters need. Its device has no memory left for one."""

    def __init__(self) -> None:
        self.dropped: list[int] = []

    def keep_adapter(self, number: int) -> Any:
        raise RuntimeError("out of memory")

    def drop_adapter(self, number: int) -> None:
        self.dropped.append(number)


def test_a_rank_that_cannot_hold_an_adapter_refuses_it_and_computes_on() -> None:
    runner, meeting = _Full(), Meeting(2)
    other = threading.Thread(target=ranks.follow, args=(cast(Any, runner), ThreadRanks(1, meeting)), daemon=True)
    other.start()
    leading = ThreadRanks(0, meeting)
    leading.send(ranks.KeepAdapter(3, "/adapters/three", b""))
    assert leading.least(1) == 0
    leading.send(ranks.End())
    other.join(PATIENCE_S)
    assert not other.is_alive() and runner.dropped == [3]
