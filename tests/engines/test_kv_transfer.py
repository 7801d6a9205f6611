"""Prompts that are computed by another engine: the same tokens as without it, whatever is lost, late or forged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import msgspec
import pytest
import torch

from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import BlockPages, Page
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import Room
from stage_runtime.kv_transfer.records import PieceHeader
from stage_runtime.rules.autoregressive import steps
from stage_runtime.rules.autoregressive.requests import FinishReason, Request, TokenLimits
from stage_runtime.rules.autoregressive.steps import Row
from tests.engines.generation_kit import CONFIGS, GREEDY, Answers, alone, core, rows_of
from tests.engines.kv_pair_kit import Pair, prompts
from tests.engines.test_speculation import Foreseeing
from tests.thoroughness import rows

PROMPT = prompts(1)[0]
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def by_itself(params: SamplingParams, prompt: Sequence[int] = PROMPT, **others: Any) -> list[int]:
    answers = Answers(core())
    answers.ask("r", prompt, params, **others)
    answers.run()
    answers.engine.shutdown()
    return answers.tokens["r"]


@pytest.mark.parametrize(("kind", "backend"), rows([*product(CONFIGS, ["gather", "pages"])], each_run=4))
def test_a_prompt_from_prefill_is_answered_as_one_that_was_computed_here(kind: str, backend: str) -> None:
    pair = Pair(kind, backend=backend)
    pair.d.ask("r", PROMPT)
    pair.run()
    assert pair.d.tokens["r"] == alone(kind, PROMPT, 12)
    assert pair.counts["received_blocks"] == 7  # of the 30 tokens, 28; the last two are computed here
    stats = pair.d.engine.scheduler.stats
    assert (stats.received_tokens, stats.hit_tokens) == (28, 0)  # what another engine computed was not cached
    assert pair.leaked == [0, 0]
    pair.close()


def test_blocks_cross_chunk_by_chunk_while_the_prompt_is_computed(pair: Pair) -> None:
    pair.d.ask("r", prompts(1, 100)[0])
    seen: list[int] = []

    def ship(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        """Note how much prefill has still to compute when a piece goes out."""
        seen.append(sum(len(one.tokens) - one.computed for one in pair.p.engine.scheduler))
        pair.deliver(room, header, tensors)

    pair.shipping = ship
    pair.run()
    assert len(seen) == 6 and seen[0] > 0  # chunks of 16 tokens
    assert pair.d.tokens["r"] == alone("llama", prompts(1, 100)[0], 12)


@pytest.mark.parametrize(
    "params",
    [
        SEEDED,
        SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, min_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, logit_bias={65: 4.0}),
    ],
)
def test_what_a_client_asks_for_is_as_without_transfer(pair: Pair, params: SamplingParams) -> None:
    pair.d.ask("r", PROMPT, params)
    pair.run()
    assert pair.d.tokens["r"] == by_itself(params)
    assert pair.counts["received_blocks"] == 7


def test_prompt_logprobs_are_computed_here(pair: Pair) -> None:
    pair.d.ask("r", PROMPT, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1))
    pair.run()
    assert not pair.asks


def test_rows_in_a_prompt_cross_with_it(pair: Pair) -> None:
    prompt = [*PROMPT[:10], *[-1] * 8, *PROMPT[10:]]
    rows = rows_of("llama", range(40, 48))
    pair.d.ask("r", prompt, GREEDY, prompt_embeds=rows)
    pair.run()
    assert pair.d.tokens["r"] == alone("llama", [*PROMPT[:10], *range(40, 48), *PROMPT[10:]], 12)
    assert pair.counts["received_blocks"] == 9


def test_kept_rows_of_a_prompt_cross_with_its_keys() -> None:
    keep = {"hidden": (1, "prompt")}
    here = Answers(core(keep_rows=keep))
    here.ask("r", PROMPT)
    here.run()
    pair = Pair(keep_rows=keep)
    given: list[Any] = []
    step = pair.d.engine.step_fn
    pair.d.engine.step_fn = lambda: _noted(step(), given)
    pair.d.ask("r", PROMPT)
    pair.run()
    (found,) = [one.prompt["hidden"] for one in given if one.prompt]
    torch.testing.assert_close(found, here.rows["r"].prompt["hidden"])  # in other chunks
    assert pair.counts["received_blocks"] == 7
    pair.close()


def _noted(stepped: Any, rows: list[Any]) -> Any:
    rows += [one.rows for one in stepped[0] if one.rows is not None]
    return stepped


def test_only_blocks_that_are_not_here_are_asked_for(pair: Pair) -> None:
    pair.d.ask("a", PROMPT[:13])
    pair.run()
    pair.d.ask("b", PROMPT)
    pair.run()
    assert pair.counts["received_blocks"] == 3 + 4
    assert pair.d.tokens["b"] == alone("llama", PROMPT, 12)


def test_a_prompt_below_the_threshold_is_computed_here() -> None:
    pair = Pair(least=17)
    pair.d.ask("short", PROMPT[:17])
    pair.d.ask("long", PROMPT[:22])
    pair.run()
    assert (pair.counts["short"], len(pair.asks)) == (1, 1)
    pair.close()


def test_without_a_prefill_instance_prompts_are_computed_here(pair: Pair) -> None:
    pair.bound = False
    pair.d.ask("r", PROMPT)
    pair.run()
    assert pair.d.tokens["r"] == alone("llama", PROMPT, 12)
    assert (pair.counts["unbound"], pair.asks) == (1, [])


def test_requests_with_the_same_beginning_ask_for_it_once(pair: Pair) -> None:
    for name in ("a", "b", "c"):
        pair.d.ask(name, PROMPT, GREEDY)
    pair.run()
    assert {tuple(tokens) for tokens in pair.d.tokens.values()} == {tuple(alone("llama", PROMPT, 12))}
    assert pair.counts["received_blocks"] == 7 and len(pair.asks) == 1
    # of each, the two tokens that do not fill a block, and all answers but their last tokens
    assert pair.d.engine.scheduler.stats.computed_tokens == 3 * (2 + 11)


def test_many_prompts_through_small_pools_are_answered_right_with_preemptions() -> None:
    pair = Pair(blocks=24, max_requests=6)
    for index, prompt in enumerate(prompts(12, 33)):
        pair.d.ask(f"r{index}", prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    pair.run()
    for index, prompt in enumerate(prompts(12, 33)):
        assert pair.d.tokens[f"r{index}"] == alone("llama", prompt, 30)
    assert pair.d.engine.scheduler.stats.preemptions > 0
    assert pair.leaked == [0, 0]
    pair.close()


def test_blocks_cross_from_wherever_they_lie_to_wherever_there_is_room() -> None:
    def pages(fill: float) -> BlockPages:
        shapes = ((12, 4, 2, 8), (12, 4, 1, 3))
        return BlockPages([Page(str(at), torch.full(shape, fill)) for at, shape in enumerate(shapes)])

    here, there = pages(0.0), pages(-1.0)
    for one in here.pages:
        one.values.copy_(torch.arange(one.values.numel()).view(one.values.shape))
    there.load([2, 1, 8, 9], here.export([3, 4, 9, 1]))
    for one, other in zip(here.pages, there.pages, strict=True):
        assert other.values[[2, 1, 8, 9]].equal(one.values[[3, 4, 9, 1]])
        assert (other.values[[0, 3, 4, 5, 6, 7, 10, 11]] == -1).all()


class Saved:
    """`KVConnector` that brings nothing, and notes what it is given to save."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, list[int]]] = []
        self.found: list[tuple[int, int]] = []  #: Start and count of rows.

    def get_num_new_matched_tokens(self, request: Any, made: Any, computed: int, whole: int) -> int:
        return 0

    def update_state_after_alloc(self, load: Any, request: Any) -> None: ...
    def load_finished(self, load: Any) -> None: ...
    def request_finished(self, request: Any) -> None: ...
    def close(self) -> None: ...

    def found_kv(self, row: Row) -> None:
        self.found.append((row.start, row.count))

    def save_kv(self, row: Row) -> None:
        self.rows.append((row.request.id, list(row.request.blocks)))


def test_rows_of_a_request_that_ended_while_they_were_computed_are_not_saved() -> None:
    answers, saved = Answers(core(overlapping=True)), Saved()
    answers.engine.connect(saved, lambda function: function())
    answers.ask("ends", prompts(1, 40)[0])
    answers.ask("stays", prompts(1, 40, first=9)[0])
    answers.step()
    answers.engine.abort_requests(["ends"])
    answers.run()
    assert {name for name, _blocks in saved.rows} == {"stays"}
    assert all(blocks for _name, blocks in saved.rows)
    answers.engine.shutdown()


def test_blocks_before_a_row_are_given_out_only_when_none_of_them_is_being_computed() -> None:
    answers, saved = Answers(core()), Saved()
    loads = answers.engine.connect(saved, lambda function: function())
    request = Request("r", range(12), TokenLimits(max_tokens=1))
    for start, in_flight in [(0, 1), (4, 2), (8, 1)]:
        request.in_flight = in_flight
        loads.found([steps.row(request, start, 4)])
    assert saved.found == [(8, 4)]
    answers.engine.shutdown()


# --- failures: right tokens, nothing leaked ----------------------------------------------------------------------


def _answered(pair: Pair, name: str = "r") -> None:
    pair.run()
    assert pair.d.tokens[name] == alone("llama", PROMPT, 12)
    assert pair.leaked == [0, 0]
    assert not pair.opened


@pytest.mark.parametrize(
    "fields",
    [
        {"key": b"\0" * 16},
        {"prompt": b"\0" * 16},
        {"layout": b"\0" * 8},
        {"first": 1},
        {"first": 5},
        {"first": -1},
        {"first": 1 << 62},
        {"count": 0},
        {"count": 3},
        {"count": -4},
        {"checksum": 7},
        {"checksum": None},
        {"computed_s": float("nan")},
        {"computed_s": float("-inf")},
        {"computed_s": float("inf")},
        {"computed_s": -1.0},
    ],
    ids=str,
)
def test_a_piece_that_is_not_what_was_asked_for_is_never_used(pair: Pair, fields: dict[str, Any]) -> None:
    pair.shipping = pair.forge(**fields)
    pair.d.ask("r", PROMPT)
    _answered(pair)
    assert (pair.counts["refused"], pair.counts.get("received_blocks", 0)) == (1, 0)


@pytest.mark.parametrize("header", [b"", b"\x90", b"garbage" * 40])
def test_garbage_instead_of_a_header_is_never_used(pair: Pair, header: bytes) -> None:
    pair.shipping = lambda room, _header, tensors: pair.deliver(room, header, tensors)
    pair.d.ask("r", PROMPT)
    _answered(pair)
    assert pair.counts["refused"] == 1


def test_bytes_that_changed_on_their_way_are_never_used(pair: Pair) -> None:
    def ship(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        tensors[0][100] ^= 1
        pair.deliver(room, header, tensors)

    pair.shipping = ship
    pair.d.ask("r", PROMPT)
    _answered(pair)
    assert pair.counts["refused"] == 1


@pytest.mark.parametrize("change", [lambda flat: flat[:-1], lambda flat: flat[:0], lambda flat: flat.float()])
def test_a_piece_of_another_size_or_dtype_is_never_used(pair: Pair, change: Any) -> None:
    pair.shipping = lambda room, header, tensors: pair.deliver(room, header, [change(tensors[0])])
    pair.d.ask("r", PROMPT)
    _answered(pair)


def test_a_piece_that_comes_twice_ends_the_room(pair: Pair) -> None:
    def twice(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        pair.deliver(room, header, tensors)
        pair.deliver(room, header, tensors)

    pair.shipping = twice
    pair.d.ask("r", PROMPT)
    _answered(pair)
    assert pair.counts["refused"] == 1


def test_pieces_of_an_earlier_ask_land_nowhere(pair: Pair) -> None:
    """The blocks of the first ask belong to another prompt when its pieces come."""
    late: list[Any] = []
    pair.shipping = lambda room, header, tensors: late.append((room, header, [one.clone() for one in tensors]))
    pair.d.ask("first", prompts(1, first=50)[0])
    for _ in range(4):
        pair.turn()
    pair.d.engine.abort_requests(["first"])
    pair.d.finish["first"] = (FinishReason.ABORT, None)
    pair.shipping = pair.deliver
    pair.d.ask("r", PROMPT)
    for one in late:
        pair.deliver(*one)
    assert late
    _answered(pair)


def test_a_piece_for_one_room_is_refused_in_another(pair: Pair) -> None:
    rooms: list[Room] = []

    def swap(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        rooms.append(room)
        other = next((one for one, _record, _tensors in pair.asks if one != room), room)
        pair.deliver(other, header, tensors)
        pair.deliver(room, header, tensors)

    pair.shipping = swap
    pair.d.ask("r", PROMPT)
    pair.d.ask("s", prompts(1, first=70)[0])
    _answered(pair)
    assert pair.d.tokens["s"] == alone("llama", prompts(1, first=70)[0], 12)
    assert pair.counts["refused"] >= 1


def test_blocks_that_were_lost_are_computed_here_after_a_while(pair: Pair) -> None:
    pair.shipping = lambda room, header, tensors: None
    pair.d.ask("r", PROMPT)
    pair.settle()
    pair.decoder.look()
    pair.settle()
    assert not pair.d.finish  # it may come
    pair.now += 31
    pair.decoder.look()
    _answered(pair)
    assert pair.counts["silent"] == 1


def test_a_room_that_prefill_closes_is_computed_here_from_what_has_come(pair: Pair) -> None:
    prompt = prompts(1, 60)[0]

    def once(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        if len(pair.pieces) == 1:
            pair.deliver(room, header, tensors)
        else:
            pair.prefill.close(room, "its process ends")

    pair.shipping = once
    pair.d.ask("r", prompt)
    pair.run()
    assert pair.d.tokens["r"] == alone("llama", prompt, 12)
    assert (pair.counts["declined"], pair.counts["received_blocks"]) == (1, 4)
    assert pair.leaked == [0, 0]


def test_a_priority_that_no_message_can_carry_costs_its_own_prompt_the_other_engine(pair: Pair) -> None:
    pair.d.ask("r", PROMPT, priority=10**30)
    _answered(pair)
    assert (pair.counts["error"], pair.asks) == (1, [])


def test_an_ask_that_nobody_answers_waits_and_its_abort_frees_all(pair: Pair) -> None:
    pair.asking = lambda room: False
    pair.d.ask("r", PROMPT)
    pair.settle()
    assert pair.leaked[0] == 7
    assert not pair.d.engine.has_work()  # nothing is polled
    pair.d.engine.abort_requests(["r"])
    assert pair.leaked[0] == 0
    assert [reason for _room, reason in pair.decode.closes] == ["the request has ended"]


def test_an_abort_while_blocks_come_frees_both_sides(pair: Pair) -> None:
    def abort(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        pair.deliver(room, header, tensors)
        pair.d.posted.put(lambda: pair.d.engine.abort_requests(["r"]))

    pair.shipping = abort
    pair.d.ask("r", prompts(1, 100)[0])
    for _ in range(30):
        pair.turn()
    assert pair.leaked == [0, 0]
    assert len(pair.pieces) < 6  # prefill has stopped


def test_prefill_that_runs_out_of_length_says_so_and_decode_computes_it() -> None:
    pair = Pair(prefilling={"max_model_len": 20})
    pair.d.ask("r", PROMPT)
    _answered(pair)
    assert "20" in str(pair.prefill.closes[0][1])
    pair.close()


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"dtype": "bfloat16"}, "dtype: bfloat16 here, float32 there"),
        ({"weights": "ab"}, "weights: ab here"),
        ({"pages": ()}, "pages: 0 pages here, 4 pages there"),
    ],
)
def test_engines_that_differ_refuse_each_other_and_name_the_difference(layout: dict[str, Any], says: str) -> None:
    pair = Pair(layout=layout)
    pair.d.ask("r", PROMPT)
    _answered(pair)
    assert says in str(pair.prefill.closes[0][1])
    pair.close()


@pytest.mark.parametrize("record", [b"", b"\x80", b"garbage"])
def test_an_ask_that_cannot_be_read_costs_prefill_nothing(pair: Pair, record: bytes) -> None:
    assert pair.prefill.sink is not None
    room = Room("cc", "evil", 1, 1)
    pair.opened.add(room)
    pair.prefill.sink.asked(room, "decode", record, [])
    pair.settle()
    assert pair.prefill.closes and pair.prefill.closes[0][0] == room
    pair.d.ask("r", PROMPT)
    _answered(pair)


def test_a_reader_that_lags_costs_no_step_and_holds_a_bounded_part_of_the_pool() -> None:
    pair = Pair(max_inflight=1, blocks=64)
    pair.takes = False
    pair.d.ask("slow", prompts(1, 100)[0])
    for _ in range(20):
        pair.turn()
    assert not pair.p.engine.has_work()  # computed to its end
    assert 0 < pair.prefiller.kept_blocks <= 32
    assert pair.leaked[1] == pair.prefiller.kept_blocks
    pair.take_all()
    pair.run()
    assert pair.d.tokens["slow"] == alone("llama", prompts(1, 100)[0], 12)
    assert pair.leaked == [0, 0]
    pair.close()


def test_a_reader_that_lags_too_far_loses_its_room_and_computes_the_prompt() -> None:
    pair = Pair(max_inflight=1, prefilling={"blocks": 30})
    pair.takes = False
    pair.d.ask("slow", prompts(1, 100)[0])
    pair.run()
    assert pair.d.tokens["slow"] == alone("llama", prompts(1, 100)[0], 12)
    assert pair.leaked == [0, 0]
    assert "too slowly" in str(pair.prefill.closes[0][1])
    pair.close()


def test_right_and_wrong_drafts_after_a_prompt_from_prefill_give_the_tokens_of_none() -> None:
    whole = alone("llama", PROMPT, 40)
    pair = Pair(decoding={"proposer": Foreseeing({"r": whole}), "num_speculative_tokens": 4})
    pair.d.ask("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    pair.run()
    assert pair.d.tokens["r"] == whole
    stats = pair.d.engine.scheduler.stats
    assert stats.received_tokens == 28 and stats.accepted_tokens > 20
    assert pair.leaked == [0, 0]
    pair.close()


def test_blocks_are_copied_into_the_memory_that_is_given_and_none_that_is_not_there() -> None:
    pages = BlockPages([Page("0.key", torch.arange(32, dtype=torch.int16).view(4, 2, 2, 2))])
    into = torch.zeros(2 * pages.block_nbytes, dtype=torch.uint8)
    assert pages.export([3, 1], into) is into
    assert into.view(torch.int16).tolist() == [*range(24, 32), *range(8, 16)]
    for blocks in ([1, 4], [-1, 2]):
        with pytest.raises(ValueError, match="of 4"):
            pages.load(blocks, into)
    assert pages.export([3, 1]).tolist() == into.tolist()


def test_a_checksum_differs_by_one_bit_of_a_piece_or_by_its_header() -> None:
    header = PieceHeader(key=bytes(16), prompt=b"p", layout=b"l", first=0, count=1)
    flat = torch.zeros(100_000, dtype=torch.uint8)
    changed = flat.clone()
    changed[99_999] = 1
    moved = msgspec.structs.replace(header, first=1)
    assert len({records.checksum(header, flat), records.checksum(header, changed), records.checksum(moved, flat)}) == 3
