"""Blocks that cross by a real relay and are not what decode asked for: the right tokens, and the failure is counted.

Five cases, over every relay between machines and shm: a failed receive, blocks out of range, a reference that is used
again, a stale one after its memory was given to another prompt, a sender that has started again under the same name.
Whole pipelines: tests/e2e/test_prefill_apart.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import Piece
from stage_runtime.wire.messages import KVPiece
from tests.stage import kv_relay_kit as kit
from tests.stage.kv_relay_kit import KVPair, kv_pair
from tests.thoroughness import rows

RELAYS = ("shm", "tcp", "nixl", "mooncake")
PIECES = kit.PROMPT // kit.CHUNK + 1  # the last chunk is divided
BLOCKS = (kit.PROMPT - 1) // kit.BLOCK

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("relay", rows(RELAYS, each_run=2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    kit.save_model(made)
    return made


@pytest.fixture
async def pair(relay: str, model: Path) -> AsyncIterator[KVPair]:
    async with kv_pair(relay, model) as made:
        yield made


async def right(pair: KVPair, model: Path, *numbers: int) -> None:
    """These prompts, which were asked before, have the answers of one engine."""
    for number in numbers:
        assert await pair.answer(number) == kit.expected(model, number)


async def goes_on(pair: KVPair, model: Path, relay: str, number: int) -> None:
    """The next prompt comes from prefill, by the relay."""
    blocks, put = pair.received_blocks, len(pair.noted["p"].given)
    pair.ask(number)
    await right(pair, model, number)
    assert pair.received_blocks - blocks == BLOCKS
    assert {one.backend for one in pair.noted["p"].given[put:]} == {relay}
    await pair.at_rest()


async def withheld(pair: KVPair, number: int) -> list[KVPiece]:
    """The pieces of this prompt, none of which is delivered."""
    pair.withholds, before = True, len(pair.withheld)
    pair.ask(number)
    await pair.until(lambda: len(pair.withheld) == before + PIECES)
    pair.withholds = False
    return pair.withheld[before:]


async def test_a_prompt_crosses_by_the_relay_that_is_named(pair: KVPair, model: Path, relay: str) -> None:
    await goes_on(pair, model, relay, 1)
    assert pair.failed_prompts() == {}


async def test_blocks_that_cannot_be_received_are_computed_here(pair: KVPair, model: Path, relay: str) -> None:
    """Both ends have let go of the bytes when the message about them comes."""
    pieces = await withheld(pair, 1)
    for name, other in (("p", "d"), ("d", "p")):
        pair.noted[name].forget(other)
    for piece in pieces:
        pair.deliver(piece)
    await right(pair, model, 1)
    assert pair.failed_prompts() == {"lost": 1}
    for name, other in (("p", "d"), ("d", "p")):
        pair.noted[name].open(other, pair.noted[other].facts())
    await goes_on(pair, model, relay, 2)


@pytest.mark.parametrize("first", [BLOCKS, -2])
async def test_blocks_out_of_range_are_never_written(relay: str, model: Path, first: int) -> None:
    """Their checksum is right: prefill itself is wrong."""
    wrong = [True]

    def forge(piece: Piece) -> Piece:
        if not wrong:
            return piece
        header = msgspec.structs.replace(records.decode_header(piece.header), first=first)
        header = msgspec.structs.replace(header, checksum=records.checksum(header, piece.tensors[0]))
        return piece._replace(header=records.encode(header))

    async with kv_pair(relay, model, forge=forge) as pair:
        pair.ask(1)
        await right(pair, model, 1)
        assert (pair.failed_prompts(), pair.received_blocks) == ({"refused": 1}, 0)
        wrong.clear()
        await goes_on(pair, model, relay, 2)


async def test_a_reference_that_was_used_already_gives_nothing(pair: KVPair, model: Path, relay: str) -> None:
    """Each piece names the memory of the first one."""
    seen: list[bytes] = []

    def again(piece: KVPiece) -> KVPiece:
        seen.append(piece.body.transfer)
        return msgspec.structs.replace(piece, body=msgspec.structs.replace(piece.body, transfer=seen[0]))

    pair.changed = again
    pair.ask(1)
    await right(pair, model, 1)
    assert sum(pair.failed_prompts().values()) == 1
    pair.changed = lambda piece: piece
    await goes_on(pair, model, relay, 2)


def with_reference(piece: KVPiece, other: KVPiece) -> KVPiece:
    return msgspec.structs.replace(piece, body=msgspec.structs.replace(piece.body, transfer=other.body.transfer))


async def test_a_reference_whose_memory_another_prompt_has_gives_nothing(pair: KVPair, model: Path, relay: str) -> None:
    """The first prompt is aborted, its memory is said to be free, and the second one's pieces name it."""
    stale = await withheld(pair, 1)
    pair.abort("r1")
    await pair.at_rest()
    pair.release_all()
    old = iter(stale)
    pair.changed = lambda piece: with_reference(piece, next(old))
    pair.ask(2)
    await right(pair, model, 2)
    assert sum(pair.failed_prompts().values()) == 1
    pair.changed = lambda piece: piece
    late = pair.late
    for piece in stale:
        pair.deliver(piece)
    await pair.until(lambda: pair.late >= late + PIECES)
    await goes_on(pair, model, relay, 3)


async def test_pieces_that_come_after_their_blocks_were_given_to_other_prompts_are_right(
    pair: KVPair, model: Path, relay: str
) -> None:
    """Prefill's cache holds few prompts, and takes the first one's blocks for the next ones."""
    first = await withheld(pair, 1)
    for number in range(2, 6):
        pair.ask(number)
        await right(pair, model, number)
    for piece in first:
        pair.deliver(piece)
    await right(pair, model, 1)
    assert pair.failed_prompts() == {}
    await pair.at_rest()


async def test_what_an_earlier_life_of_a_sender_has_sent_lands_nowhere(pair: KVPair, model: Path, relay: str) -> None:
    """The next one has its incarnation, too, which no process gets by chance. Another piece lies there where the
    earlier one's reference names memory of the next one's: were it the piece's own, nothing would be wrong.
    """
    stale = await withheld(pair, 1)
    pair.end("p")
    await right(pair, model, 1)
    assert pair.failed_prompts() == {"lost": 1}
    pair.start("p", "pre")
    await pair.ready()
    pair.meet()
    late = pair.late
    fresh = await withheld(pair, 2)
    for piece in stale:
        pair.deliver(piece)
    await pair.until(lambda: pair.late >= late + PIECES)
    pair.deliver(with_reference(fresh[1], stale[0]))
    await right(pair, model, 2)
    assert sum(pair.failed_prompts().values()) == 2
    await goes_on(pair, model, relay, 3)
