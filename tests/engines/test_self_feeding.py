"""Steps that feed themselves, rows of layers that are kept, rows that are added: beside the same model computed whole.

The decoder of these tests makes each next input of the token's embedding, its hidden state and what it has seen before,
so a row that is lost, repeated or another request's changes every later token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import stage_runtime as omni
from stage_runtime.engines.autoregressive.model.rows.embeddings import ModelEmbeddings
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import (
    ROW,
    AddedRows,
    Extension,
    RequestRows,
)
from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.autoregressive.blocks import hash_blocks
from stage_runtime.rules.autoregressive.requests import FinishReason
from tests.engines.generation_kit import GREEDY, Answers, core, rows_of, tiny_model

pytestmark = pytest.mark.usefixtures("each_way")

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [9] * 21, "c": [7, 3], "d": [200, 100, 50, 25, 12, 6]}


@functools.cache
def embedding() -> Any:
    return tiny_model("llama").get_input_embeddings()


def mixed(token: Tensor, hidden: Tensor, seen: Any) -> Tensor:
    rows: Tensor = embedding()(token) + 0.3 * torch.roll(hidden, 1, -1) + 0.01 * seen
    return rows


def after_step(step: omni.Step) -> omni.NextRows:
    seen = []
    for token, state in zip(step.tokens.tolist(), step.states, strict=True):
        state["sum"] = state.get("sum", 0) + token
        seen.append(float(state["sum"] % 17))
    rows = mixed(step.tokens, step.hidden, torch.tensor(seen)[:, None])
    return omni.NextRows(rows=rows, emitted=torch.stack([step.tokens, step.tokens % 7], 1))


def whole(prompt: Tensor, count: int, fed: Callable[[int], Tensor | None] = lambda place: None) -> list[int]:
    """Computed from the start at every token."""
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    tokens: list[int] = []
    rows = prompt[None]
    with torch.no_grad():
        for place in range(count):
            out = model(inputs_embeds=rows, output_hidden_states=True, use_cache=False)
            token = out.logits[0, -1].argmax()
            tokens.append(int(token))
            row = mixed(token, out.hidden_states[-1][0, -1], float(sum(tokens) % 17))
            more = fed(place)
            rows = torch.cat([rows, (row if more is None else row + more)[None, None]], dim=1)
    return tokens


def expected(name: str, count: int = 12) -> list[int]:
    return whole(rows_of("llama", PROMPTS[name]), count)


def test_a_decoder_makes_the_next_input_of_each_request_in_any_batch() -> None:
    answers = Answers(core(after_step=after_step))
    answers.ask("a", PROMPTS["a"])
    answers.step()
    for name in ("b", "c", "d"):
        answers.ask(name, PROMPTS[name])
    answers.run()
    assert answers.tokens == {name: expected(name) for name in PROMPTS}
    for name, tokens in answers.tokens.items():
        emitted = torch.stack(list(answers.rows[name].emitted)).tolist()
        assert emitted == [[token, token % 7] for token in tokens[:-1]], "the last token has no next input"
    answers.engine.shutdown()


def test_a_request_keeps_its_own_rows_and_not_those_of_the_requests_beside_it() -> None:
    answers = Answers(core(after_step=after_step))
    for name in PROMPTS:
        answers.ask(name, PROMPTS[name])
    for _ in range(6):
        answers.step()
    runner: Any = answers.engine.executor.call(lambda one: one).result()
    kept = [row for own in runner._feeding.own.values() for row in own.rows]
    assert len(kept) >= 8
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in kept)
    answers.engine.shutdown()


def test_a_preempted_request_replays_its_own_rows_and_its_decoder_is_not_asked_again() -> None:
    asked: list[int] = []

    def counting(step: omni.Step) -> omni.NextRows:
        asked.extend(step.places)
        return after_step(step)

    answers = Answers(core(after_step=counting, blocks=13, prefix_caching=False))
    for name in ("b", "a", "d"):
        answers.ask(name, PROMPTS[name])
    answers.run()
    assert answers.engine.scheduler.stats.preemptions > 0
    assert answers.tokens == {name: expected(name) for name in ("b", "a", "d")}
    assert sorted(asked) == sorted([*range(11)] * 3)


def test_blocks_of_rows_that_were_made_are_not_found_by_other_prompts() -> None:
    answers = Answers(core(after_step=after_step))
    answers.ask("a", PROMPTS["a"])
    answers.run()
    again = PROMPTS["a"] + answers.tokens["a"]
    answers.ask("again", again, msgspec.structs.replace(GREEDY, max_tokens=4))
    answers.run()
    assert answers.tokens["again"] == whole(rows_of("llama", again), 4)


def test_each_token_waits_for_a_row_of_its_stream_then_the_end_once_then_the_pad() -> None:
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)) * 0.2
    end, pad = rows[0] + 0.5, rows[1] - 0.25
    answers = Answers(core(after_step=after_step))
    engine = answers.engine

    def extend(more: Extension) -> None:
        engine.extend_request("a", engine.preprocess_extension(more), last=more.last)

    answers.ask("a", [], open=True)
    extend(Extension(prompt_token_ids=PROMPTS["a"]))
    answers.run()
    assert answers.tokens["a"] == [], "the answer waits for the prompt's end"
    extend(Extension(feed=omni.Feed(rows=rows[:1], end=end, pad=pad)))
    answers.run()
    assert (len(answers.tokens["a"]), engine.has_work()) == (2, False)
    extend(Extension(feed=omni.Feed(rows=rows[1:])))
    answers.run()
    assert len(answers.tokens["a"]) == 4
    extend(Extension(last=True))
    answers.run()
    fed = [*rows, end, *[pad] * 12]
    assert answers.tokens["a"] == whole(rows_of("llama", PROMPTS["a"]), 12, lambda place: fed[place])
    assert engine.scheduler.pool.free == engine.scheduler.pool.capacity


def test_a_request_whose_decoder_raises_fails_alone() -> None:
    before = sum(expected("a")[:3])

    def broken(step: omni.Step) -> omni.NextRows:
        if any(place == 3 and state["sum"] == before for place, state in _pairs(step)):
            raise ValueError("no row for this one")
        return after_step(step)

    answers = Answers(core(after_step=broken))
    answers.ask("a", PROMPTS["a"])
    for _ in range(3):
        answers.step()
    answers.ask("b", PROMPTS["b"])
    answers.run()
    assert answers.finish["a"] == (FinishReason.ERROR, "ValueError: no row for this one")
    assert answers.tokens["b"] == expected("b")


def _pairs(step: omni.Step) -> list[tuple[int, dict[str, Any]]]:
    return list(zip(step.places, step.states, strict=True))


ONE = torch.zeros(1, 32)


@pytest.mark.parametrize(
    "given",
    [
        None,
        omni.NextRows(rows=torch.zeros(3, 32)),
        omni.NextRows(rows=torch.zeros(1, 31)),
        omni.NextRows(rows="rows"),
        omni.NextRows(rows=ONE, emitted=[[1]]),
        omni.NextRows(rows=ONE, emitted=torch.zeros(2, 1)),
        omni.NextRows(rows=ONE, ends=[False, True]),
    ],
)
def test_what_is_not_a_row_for_each_request_fails_them_and_the_next_are_served(given: Any) -> None:
    state = {"broken": True}

    def odd(step: omni.Step) -> Any:
        return given if state["broken"] else after_step(step)

    answers = Answers(core(after_step=odd))
    answers.ask("a", PROMPTS["a"])
    answers.run()
    assert answers.finish["a"][0] is FinishReason.ERROR
    assert "after_step" in str(answers.finish["a"][1])
    state["broken"] = False
    answers.ask("c", PROMPTS["c"])
    answers.run()
    assert answers.tokens["c"] == expected("c")


def test_a_step_that_fails_late_leaves_no_trace_in_the_requests_beside() -> None:
    """Rows that were given for some requests only, or raised after their states have changed, are asked for again."""
    calls: list[int] = []

    def late(step: omni.Step) -> omni.NextRows:
        made = after_step(step)
        calls.append(len(step.places))
        if len(step.places) == 1:
            return made
        if len(calls) % 2:
            raise SystemExit("after the states have changed")
        return omni.NextRows(rows=made.rows, emitted=made.emitted[:1])

    answers = Answers(core(after_step=late))
    for name in ("a", "c", "d"):
        answers.ask(name, PROMPTS[name])
    answers.run()
    assert max(calls) > 1
    assert answers.tokens == {name: expected(name) for name in ("a", "c", "d")}
    assert all(len(answers.rows[name].emitted) == 11 for name in answers.tokens)


def test_a_decoder_may_end_an_answer() -> None:
    def ending(step: omni.Step) -> omni.NextRows:
        made = after_step(step)
        return omni.NextRows(rows=made.rows, emitted=made.emitted, ends=[place == 4 for place in step.places])

    answers = Answers(core(after_step=ending))
    answers.ask("a", PROMPTS["a"])
    answers.run()
    assert answers.tokens["a"] == expected("a")[:5]
    assert answers.finish["a"] == (FinishReason.STOP, None)
    assert len(answers.rows["a"].emitted) == 4


def test_random_numbers_of_a_decoder_depend_on_seed_and_place_alone() -> None:
    drawn: dict[tuple[int, int], list[float]] = {}

    def noting(step: omni.Step) -> omni.NextRows:
        for place, sampling, row in zip(step.places, step.sampling, step.uniform(3).tolist(), strict=True):
            assert drawn.setdefault((sampling.seed, place), row) == row
            assert all(0 <= one < 1 for one in row)
        return after_step(step)

    for names in (["a"], ["a", "b", "c"]):
        answers = Answers(core(after_step=noting))
        for index, name in enumerate(names):
            answers.ask(name, PROMPTS[name], msgspec.structs.replace(GREEDY, seed=index))
        answers.run()
    assert len({tuple(row) for row in drawn.values()}) == len(drawn)


# --- rows of layers ---------------------------------------------------------------------------------------------------

KEEP = {"input": (0, "all"), "first": (1, "prompt"), "second": (2, "all")}


def states(prompt: Sequence[int], generated: Sequence[int]) -> list[Tensor]:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    seen: list[Tensor] = []
    hook = model.model.layers[1].register_forward_hook(
        lambda _module, _given, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        out = model(input_ids=torch.tensor([[*prompt, *generated]]), output_hidden_states=True, use_cache=False)
    hook.remove()
    return [out.hidden_states[0][0], out.hidden_states[1][0], seen[0].reshape(-1, 32)]


@pytest.mark.parametrize("chunk", [16, 3])
def test_rows_of_layers_are_those_of_transformers_in_chunks_and_from_the_cache(chunk: int) -> None:
    answers = Answers(core(keep_rows=KEEP, max_chunk=chunk))
    answers.ask("cold", PROMPTS["b"])
    answers.run()
    answers.ask("warm", PROMPTS["b"])
    answers.run()
    assert answers.engine.scheduler.stats.hit_tokens == 20
    count = len(PROMPTS["b"])
    for name in ("cold", "warm"):
        inputs, first, second = states(PROMPTS["b"], answers.tokens[name])
        rows = answers.rows[name]
        assert rows.prompt.keys() == KEEP.keys()
        for found, of_layer in (("input", inputs), ("first", first), ("second", second)):
            torch.testing.assert_close(rows.prompt[found], of_layer[:count], atol=1e-4, rtol=1e-4)
        assert rows.kept.keys() == {"input", "second"}
        torch.testing.assert_close(torch.stack(rows.kept["input"]), inputs[count:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(rows.kept["second"]), second[count - 1 : -1], atol=1e-4, rtol=1e-4)


def test_what_is_not_asked_for_is_not_given() -> None:
    answers = Answers(core())
    answers.ask("a", PROMPTS["a"])
    answers.run()
    assert answers.rows == {}


@pytest.mark.parametrize("keep", [{"x": (3, "all")}, {"x": (-1, "all")}, {"x": (1, "everything")}])
def test_a_layer_that_the_model_lacks_is_refused_by_name(keep: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"keep_rows\['x'\]"):
        core(keep_rows=keep)


# --- added rows and positions -----------------------------------------------------------------------------------------


def added_whole(prompt: Sequence[int], layer: int, places: Sequence[int], rows: Tensor, count: int) -> list[int]:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")

    def add(_module: Any, _given: Any, out: Any) -> Any:
        hidden = (out[0] if isinstance(out, tuple) else out).clone()
        hidden[0, list(places)] += rows
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    hook = model.model.layers[layer].register_forward_hook(add)
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([[*prompt, *tokens]])
            tokens.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    hook.remove()
    return tokens


@pytest.mark.parametrize("chunk", [16, 3])
def test_added_rows_change_what_follows_and_are_shared_by_equal_prompts_alone(chunk: int) -> None:
    prompt, places = PROMPTS["b"], [4, 5, 9]
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    other = rows + 1
    answers = Answers(core(max_chunk=chunk))
    for name, given in (("one", rows), ("same", rows), ("other", other), ("none", None)):
        added = [] if given is None else [AddedRows(0, places, given)]
        answers.ask(name, prompt, added_rows=added)
        answers.run()
    assert answers.tokens["one"] == answers.tokens["same"] == added_whole(prompt, 0, places, rows, 12)
    assert answers.tokens["other"] == added_whole(prompt, 0, places, other, 12)
    assert answers.tokens["none"] == added_whole(prompt, 0, [], rows[:0], 12)
    # The first block is equal for all of them; of "same", all five whole ones were there.
    assert answers.engine.scheduler.stats.hit_tokens == 20 + 4 + 4


def test_added_rows_survive_a_preemption() -> None:
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    answers = Answers(core(blocks=12, prefix_caching=False))
    for name in ("x", "y"):
        answers.ask(name, PROMPTS["b"], added_rows=[AddedRows(1, [0, 20], rows)])
    answers.run()
    assert answers.engine.scheduler.stats.preemptions > 0
    assert answers.tokens["x"] == answers.tokens["y"] == added_whole(PROMPTS["b"], 1, [0, 20], rows, 12)


PLACES = ModelEmbeddings(32, torch.float32, axes=3)


def placed(count: int, shift: int) -> tuple[torch.Tensor, int]:
    """Positions of ``count`` tokens. Tokens 3 to 6 are an image; what is after it stands ``shift`` before its index."""
    where = torch.arange(count).repeat(3, 1)
    where[0, 3:7] = 3
    where[:, 7:] -= shift
    return where, -shift


def hashes(prompt: int, shift: int) -> list[bytes]:
    """The hashes of the blocks of a request of 24 tokens, of which the first ``prompt`` are its prompt."""
    rows = RequestRows()
    rows.keep(0, PLACES.place(list(range(prompt)), None, *placed(prompt, shift)))
    return hash_blocks(list(range(24)), 4, also=rows.key)


def test_an_answer_is_shared_with_the_next_turn_at_the_same_positions() -> None:
    answered = hashes(11, 2)
    assert answered == hashes(24, 2) == hashes(12, 2), "as generated, and as a part of the next prompt"
    assert answered[0] == hashes(11, 3)[0], "before the image all is equal"
    assert not set(answered[1:]) & set(hashes(11, 3))
    same, moved = RequestRows(), RequestRows()
    for one, delta in ((same, -2), (moved, -3)):  # of one prompt, with other positions for what is generated
        one.keep(0, PLACES.place(list(range(11)), None, placed(11, 2)[0], delta))
    assert same.key(4, 8) == moved.key(4, 8)
    assert same.key(12, 16) != moved.key(12, 16)


ZEROS = torch.zeros(1, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"added_rows": [AddedRows(2, [0], ZEROS)]}, "layers 0 to 1"),
        ({"added_rows": [AddedRows(0, [5], ZEROS)]}, "from 0 to 4"),
        ({"added_rows": [AddedRows(0, [0, 0], torch.zeros(2, 32))]}, "in order"),
        ({"added_rows": [AddedRows(0, [0, 1], ZEROS)]}, "1 rows are added at 2 places"),
        ({"added_rows": [AddedRows(0, [0], torch.zeros(1, 31))]}, "added rows have the shape"),
        ({"added_rows": [AddedRows(0, [0], ZEROS / 0)]}, "finite"),
        ({"prompt_positions": torch.zeros(3, 5, dtype=torch.long)}, "it takes no positions"),
    ],
)
def test_rows_and_positions_that_do_not_fit_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    answers = Answers(core())
    with pytest.raises(ValueError, match=message):
        answers.ask("a", PROMPTS["a"], **fields)
    answers.ask("c", PROMPTS["c"])
    answers.run()
    assert len(answers.tokens["c"]) == 12


def test_rows_of_a_stream_for_a_model_that_feeds_itself_not_are_refused() -> None:
    answers = Answers(core())
    answers.ask("a", [], open=True)
    more = answers.engine.preprocess_extension(Extension(feed=omni.Feed(rows=ZEROS)))
    with pytest.raises(ValueError, match="takes no rows of a stream"):
        answers.engine.extend_request("a", more, last=False)


def test_a_prompt_of_rows_feeds_itself_as_one_of_ids_does() -> None:
    answers = Answers(core(after_step=after_step))
    answers.ask("rows", [ROW] * 5, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
                prompt_embeds=rows_of("llama", PROMPTS["a"]))  # fmt: skip
    answers.run()
    assert answers.tokens["rows"] == expected("a")
