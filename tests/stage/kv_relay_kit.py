"""A decode and a prefill process in one test, with a language model and a real relay between them.

Real: hosts, rooms, engines, connectors, send queues, relays with their memory. Messages go over links in memory, so a
test sees each of them, may withhold or change it, and may deliver it again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers as untyped

import stage_runtime as omni
from omnipipeline_spec.types.plan import RelayPlan, StagePlan
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.kv_transfer.interface import KVSink, KVTransport, Piece, Room
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.named import Put
from stage_runtime.stage.context import RankContext
from stage_runtime.stage.host import Host
from stage_runtime.wire.messages import KVPiece, Members, Message, Release
from stage_runtime.wire.parts import Member
from tests.engines.generation_kit import tiny_tokenizer
from tests.stage.stage_kit import OWNER, MemoryChannels, Registered, Uneventful, World, plan

transformers: Any = untyped

BLOCK = 16  # tokens
BLOCK_NBYTES = 64 << 10
POOL = 24  # blocks: of two prompts and a half
CHUNK = 2 * BLOCK  # a piece: 128 KiB, so that it goes by relay and not in its message
PROMPT = 4 * CHUNK + 3
ANSWER = 6
MIB = 1 << 20


def save_model(folder: Path) -> None:
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.15,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    tiny_tokenizer().save_pretrained(folder)


@functools.cache
def _reference(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def prompt(number: int) -> list[int]:
    return [(7 * at * at + 11 * at + 31 * number) % 250 for at in range(PROMPT)]


def expected(folder: Path, number: int) -> list[int]:
    """The answer of transformers' own ``generate``, greedily."""
    ids = torch.tensor([prompt(number)])
    with torch.no_grad():
        made = _reference(str(folder)).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = made[0, PROMPT:].tolist()
    return tokens


def language_model(folder: Path, **fields: Any) -> omni.Autoregressive:
    answers: dict[str, list[int]] = {}

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> list[omni.Result]:
        tokens = answers.setdefault(payload.request.id, [])
        tokens.extend(generation.tokens)
        return [] if generation.finish is None else [omni.Result(answers.pop(payload.request.id))]

    return omni.Autoregressive(
        model=str(folder),
        prompt=lambda payload: omni.Prompt(tokens=payload.data),
        deliver=deliver,
        params={"temperature": 0, "max_tokens": ANSWER, "ignore_eos": True},
        threads=1,
        block_size=BLOCK,
        max_chunk=CHUNK,
        kernels="torch",
        linears="plain",
        max_model_len=256,
        kv_cache_bytes=POOL * BLOCK_NBYTES,
        remote_prefill_tokens=1,
        **fields,
    )


class NotedRelays(Relays):
    """They note what was put, by the room's request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given: list[Put] = []

    def put(self, *arguments: Any, **options: Any) -> Put | None:
        made = super().put(*arguments, **options)
        if made is not None:
            self.given.append(made)
        return made


class Started(Uneventful):
    """It is known when the process has its engine."""

    is_loaded = False

    def loaded(self) -> None:
        self.is_loaded = True


class Forging:
    """`KVTransport` that changes each piece before it is sent."""

    def __init__(self, inner: KVTransport, forge: Callable[[Piece], Piece]) -> None:
        self._inner = inner
        self._forge = forge

    def peer(self, request_id: str) -> str | None:
        return self._inner.peer(request_id)

    def room(self, request_id: str, generation: int) -> Room | None:
        return self._inner.room(request_id, generation)

    def memory(self, nbytes: int) -> torch.Tensor:
        return self._inner.memory(nbytes)

    def ask(self, room: Room, peer: str, record: bytes, tensors: Sequence[Any]) -> None:
        self._inner.ask(room, peer, record, tensors)

    def ship(self, room: Room, piece: Piece) -> None:
        self._inner.ship(room, self._forge(piece))

    def close(self, room: Room, reason: str | None) -> None:
        self._inner.close(room, reason)

    def attach(self, sink: KVSink) -> None:
        self._inner.attach(sink)


class KVPair(World):
    """``d`` decodes what ``p`` has computed; what crosses goes by ``backend``."""

    def __init__(self, backend: str, folder: Path, forge: Callable[[Piece], Piece]) -> None:
        super().__init__()
        self._backend: Any = backend
        self._folder = folder
        self._forge = forge
        self.withheld: list[KVPiece] = []  #: Pieces that were not delivered, in order.
        self.withholds = False
        self.changed: Callable[[KVPiece], KVPiece] = lambda piece: piece
        self.noted: dict[str, NotedRelays] = {}
        self.lives: dict[str, Started] = {}
        self.start("d", "think")
        self.start("p", "pre")
        self.meet()

    def start(self, name: str, stage: str) -> None:
        """A life of a process; an earlier one of this name has ended."""
        role = {"think": "decode", "pre": "prefill"}[stage]
        made = plan(
            stage,
            terminal=role == "decode",
            entry=role == "decode",
            kv_role=role,
            kv_peer="pre" if role == "decode" else "think",
            relay=RelayPlan(backend=self._backend),
        )
        life = self.lives[name] = Started(name, self.failures, self.fenced)
        host = Host([made], life, incarnation=name, loop=self._loop)
        self.known.add(name)
        relays = NotedRelays(
            loop=self._loop,
            incarnation=name,
            on_release=lambda peer, transfer: self._loop.call_soon_threadsafe(host.release, peer, transfer),
            on_failed=host.relay_failed,
            settings=RelaySettings(
                named=frozenset({self._backend}), arena_bytes=64 * MIB, prefault_bytes=0, unclaimed_s=600.0
            ),
        )
        host.wire(MemoryChannels(self, name), Registered(), relays)  # type: ignore[arg-type]
        self.hosts[name], self.noted[name] = host, relays
        self.stage_of[stage] = name
        host.load(lambda one: self._engine(host, one))

    def _engine(self, host: Host, made: StagePlan) -> Any:
        kv: KVTransport = host.kv[made.name]
        if made.kv_role == "prefill":
            kv = Forging(kv, self._forge)
        context = RankContext(
            made,
            model_path=None,
            model_revision=None,
            allocate=lambda shape, dtype: torch.empty(shape, dtype=dtype),
            progress=lambda *_shown: None,
            emit=lambda *_: None,
            kv=kv,
        )
        return as_engine(language_model(self._folder), context=context)

    async def ready(self) -> None:
        await self.until(lambda: bool(self.failures) or all(one.is_loaded for one in self.lives.values()))
        assert not self.failures

    def meet(self) -> None:
        for name, other, stage in (("d", "p", "pre"), ("p", "d", "think")):
            facts = self.noted[other].facts()
            member = Member(other, stage, stage, "u", f"ipc:///{other}", facts, (stage,), True)
            self.send(OWNER, name, Members(joined=(member,)))

    def end(self, name: str) -> None:
        """End it as SIGKILL does: it says nothing to anybody; what it has sent is under way."""
        self.links.pop((name, "d"), None)
        assert self.hosts.pop(name).close(60.0)
        self.noted.pop(name).close()
        for peer in self.hosts:
            self.links.pop((name, peer), None)
            self.send(OWNER, peer, Members(gone=(name,)))

    # --- what is on its way ---------------------------------------------------------------------------------------

    def send(self, sender: str, receiver: str, message: Message) -> None:
        if isinstance(message, KVPiece):
            if self.withholds:
                self.withheld.append(message)
                return
            message = self.changed(message)
        super().send(sender, receiver, message)

    def deliver(self, piece: KVPiece, **changes: Any) -> None:
        """A piece that was withheld, under the name of the prefill process."""
        super().send("p", "d", msgspec.structs.replace(piece, **changes))

    def release_all(self) -> None:
        """Forged: decode is said to have let go of all that prefill has put."""
        transfers = tuple(one for put in self.noted["p"].given for one in put.transfers)
        super().send("d", "p", Release(transfers))

    # --- asking, counting -----------------------------------------------------------------------------------------

    def ask(self, number: int) -> str:
        self.submit(f"r{number}", "think", prompt(number))
        return f"r{number}"

    async def answer(self, number: int) -> list[int]:
        name = f"r{number}"
        await self.until(lambda: name in self.ended())
        assert name not in self.failed(), self.failed()[name]
        tokens: list[int] = self.results()[name]
        return tokens

    def counted(self) -> Mapping[str, float]:
        """Decode's numbers for `/metrics`, as a beat has them."""
        return self.hosts["d"].gauges()

    def failed_prompts(self) -> dict[str, float]:
        """Why prompts that were asked for were computed at decode."""
        name = "engine_kv_failed_total."
        found = ((key, value) for key, value in self.counted().items() if key.startswith(name) and value)
        return {key.removeprefix(name).partition(":")[0]: value for key, value in found}

    @property
    def received_blocks(self) -> float:
        return self.counted().get("engine_kv_received_blocks_total:think", 0)

    @property
    def late(self) -> float:
        """Pieces that came for no open room."""
        return self.counted().get("control_kv_late", 0)

    async def at_rest(self) -> None:
        """No room is open, and prefill holds nothing for decode."""
        for host in self.hosts.values():
            (transport,) = host.kv.values()
            await self.until(lambda transport=transport: transport.open_rooms == 0)  # type: ignore[misc]

    def close(self) -> None:
        for host in self.hosts.values():
            assert host.close(60.0), "a stage does not end"
        for relays in self.noted.values():
            relays.close()


@asynccontextmanager
async def kv_pair(
    backend: str, folder: Path, *, forge: Callable[[Piece], Piece] = lambda piece: piece
) -> AsyncIterator[KVPair]:
    """forge: what prefill's pieces are changed to before they are sent."""
    made = KVPair(backend, folder, forge)
    try:
        await made.ready()
        yield made
    finally:
        made.close()
        await asyncio.sleep(0)
