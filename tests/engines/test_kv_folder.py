"""Blocks that outlive their engine in a folder: the same tokens as without it, whatever lies in the folder."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from stage_runtime import testing
from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.connectors import folder as folders
from stage_runtime.engines.autoregressive.connectors import layouts, registry
from stage_runtime.engines.autoregressive.connectors.block_files import BlockFiles
from stage_runtime.engines.autoregressive.connectors.folder import FolderConnector
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.model.digests import weights_digest
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError, ProtocolError
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.engines.generation_kit import GREEDY, STATEFUL, alone, core, rows_of, tiny_model, tiny_tokenizer
from tests.engines.kv_pair_kit import Engine, prompts
from tests.engines.rank_threads import ranked
from tests.engines.test_speculation import Foreseeing
from tests.patience import patience

PROMPT = prompts(1)[0]
LAYOUT = b"\1" * 8
MOST = 1 << 30


class Stored(Engine):
    """An engine whose blocks are kept in a folder."""

    def __init__(self, at: Path, kind: str = "llama", *, most: int = MOST, engine: Any = None, **limits: Any) -> None:
        super().__init__(engine or core(kind, **limits))
        runner: Any = self.engine.executor.call(lambda one: one).result()
        spec = Autoregressive(model="tiny", block_size=self.engine.scheduler.limits.block_size)
        digest = layouts.layout_of(runner, spec, weights_digest(tiny_model(kind))).digest
        self.nbytes = runner.pages.block_nbytes
        self.files = BlockFiles(str(at), digest, self.nbytes, most)
        self.now = 0.0
        self.connector = FolderConnector(
            self.engine, self.files, self.nbytes, post=self.posted.put, clock=lambda: self.now
        )

    def rest(self) -> None:
        """Its threads are idle, and what they posted was called."""
        for _ in range(4):
            for pool in (self.connector._writer, self.connector._reader):
                pool.submit(lambda: None).result()
            self.turn()

    def run(self) -> None:
        for _ in range(2000):
            if len(self.finish) == len(self.tokens):
                break
            self.connector._reader.submit(lambda: None).result()
            self.turn()
        assert len(self.finish) == len(self.tokens)
        self.rest()

    @property
    def counts(self) -> dict[str, int]:
        assert self.engine.kv is not None
        kv = self.engine.kv
        return {str(name): count for name, count in (kv.counts + kv.computed_here).items() if count}

    @property
    def received(self) -> int:
        return self.engine.scheduler.stats.received_tokens


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Callable[..., Stored]]:
    made: list[Stored] = []

    def make(*arguments: Any, **named: Any) -> Stored:
        made.append(Stored(tmp_path / "kv", *arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.engine.shutdown()


def asked(engine: Stored, prompt: list[int] = PROMPT, name: str = "r", **others: Any) -> list[int]:
    engine.ask(name, prompt, **others)
    engine.run()
    assert engine.engine.scheduler.pool.free == engine.engine.scheduler.pool.capacity
    return engine.tokens[name]


def test_blocks_of_drafts_are_kept_when_their_tokens_are_known_to_be_right(tmp_path: Path) -> None:
    whole = alone("llama", PROMPT, 30)
    writer = Stored(tmp_path, engine=core(proposer=Foreseeing({"a": whole}), num_speculative_tokens=4))
    writer.ask("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True))
    writer.run()
    assert writer.engine.scheduler.stats.accepted_tokens > 12
    reader = Stored(tmp_path)
    reader.ask("b", [*PROMPT, *whole[:28]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    reader.run()
    assert reader.tokens["b"] == whole[28:]
    assert reader.counts["received_blocks"] >= (len(PROMPT) + 28) // 4 - 2  # those of the last draft are not known


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_later_process_finds_what_an_earlier_one_has_computed(stored: Callable[..., Stored], kind: str) -> None:
    expected = alone(kind, PROMPT, 12)  # before an engine has the model
    assert asked(stored(kind)) == expected
    later = stored(kind)
    assert asked(later) == expected
    assert (later.received, later.counts) == (
        28,
        {"loads": 1, "received_blocks": 7, "received_bytes": 7 * later.nbytes},
    )
    again = stored(kind)  # the answer's blocks were kept, too
    assert asked(again, [*PROMPT, *expected]) == alone(kind, [*PROMPT, *expected], 12)
    assert again.received == 40


def test_an_engine_of_other_ranks_finds_the_same_blocks(stored: Callable[..., Stored], tmp_path: Path) -> None:
    asked(stored())
    with ranked("llama", 2) as engine:
        ranks = Stored(tmp_path / "kv", engine=engine)
        assert asked(ranks) == alone("llama", PROMPT, 12)
        assert ranks.received == 28


def test_what_another_process_writes_is_found_after_a_while(stored: Callable[..., Stored]) -> None:
    reader, writer = stored(), stored()
    asked(writer)
    reader.now += folders.LOOK_S + 1
    asked(reader, prompts(1, first=40)[0], "other")  # this one looks again
    assert asked(reader) == alone("llama", PROMPT, 12)
    assert reader.received == 28


def test_other_salts_and_other_weights_share_nothing(stored: Callable[..., Stored]) -> None:
    asked(stored(), cache_salt="one")
    other = stored()
    asked(other, cache_salt="two")
    assert other.received == 0
    assert asked(other, name="again", cache_salt="two") == alone("llama", PROMPT, 12)
    assert weights_digest(tiny_model("llama")) != weights_digest(tiny_model("mistral"))


def test_a_model_that_was_trained_further_has_another_digest() -> None:
    model = tiny_model("llama")
    before = weights_digest(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight.clone()
        weight.mul_(1.001)
        try:
            assert weights_digest(model) != before
        finally:
            weight.copy_(kept)
    assert weights_digest(model) == before


def test_prompts_with_rows_are_not_kept(stored: Callable[..., Stored], tmp_path: Path) -> None:
    engine = stored()
    engine.ask("r", [-1] * 20, GREEDY, prompt_embeds=rows_of("llama", range(40, 60)))
    engine.run()
    assert not list(tmp_path.rglob("*.kv"))


def _files(at: Path) -> list[Path]:
    return sorted(at.rglob("*.kv"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:60] + b"\7" + path.read_bytes()[61:]),
        lambda path: path.write_bytes(b"OMNIKV00" + path.read_bytes()[8:]),
        lambda path: path.unlink(),
    ],
    ids=["empty", "short", "long", "changed", "older form", "gone"],
)
def test_a_damaged_block_is_computed_and_written_again(
    stored: Callable[..., Stored], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    asked(stored())
    later = stored()
    for path in _files(tmp_path):
        damage(path)
    assert asked(later) == alone("llama", PROMPT, 12)
    assert (later.counts["unreadable"], later.received) == (1, 0)
    assert asked(stored()) == alone("llama", PROMPT, 12)


def test_a_block_under_the_name_of_another_one_is_never_used(stored: Callable[..., Stored], tmp_path: Path) -> None:
    asked(stored())
    paths = _files(tmp_path)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    later = stored()
    assert asked(later) == alone("llama", PROMPT, 12)
    assert later.received == 0


def test_blocks_before_a_damaged_one_are_used(stored: Callable[..., Stored]) -> None:
    first = stored()
    asked(first)
    later = stored()
    made = later.engine.preprocess_add_request(_request(PROMPT))
    later.files._path(made.hash(4)[3]).write_bytes(b"garbage")
    assert asked(later) == alone("llama", PROMPT, 12)
    assert (later.received, later.counts["unreadable"]) == (12, 1)


def _request(prompt: list[int]) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="hashes", prompt_token_ids=prompt, params=GREEDY)


def test_the_folder_stays_below_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    nbytes = 100
    files = BlockFiles(str(tmp_path), LAYOUT, nbytes, 10 * (nbytes + 36))
    names = [bytes([number]) * 16 for number in range(12)]
    due = []
    for number, name in enumerate(names):
        due.append(files.write(name, torch.full((nbytes,), number, dtype=torch.uint8)))
        os.utime(files._path(name), (number, number))
    assert due == [False] * 10 + [True] * 2
    assert files.read(names[0]).tolist() == [0] * nbytes  # and so it was used last
    assert files.known() == {names[0], *names[4:]}
    other = BlockFiles(str(tmp_path), b"\2" * 8, nbytes, 5 * (nbytes + 36))  # one bound for all layouts
    assert other.known() == set()
    assert len(_files(tmp_path)) == 4


def test_what_ended_processes_left_unfinished_is_deleted_and_foreign_files_are_not(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), LAYOUT, 10, 1000)
    left, fresh, foreign = (files._folder / name for name in (f"{'ab' * 16}.kv.77", f"{'cd' * 16}.kv.78", "notes.txt"))
    for one in (left, fresh, foreign):
        one.write_text("x")
    for one in (left, foreign):
        os.utime(one, (1, 1))
    assert files.known() == set()
    assert sorted(one.name for one in files._folder.iterdir()) == sorted([fresh.name, foreign.name])


def test_folders_that_are_not_of_layouts_or_cannot_be_read_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is mounted there has a `lost+found` of the root's; layouts may be another user's."""
    theirs = tmp_path / ("ab" * 8)
    for one in (theirs, tmp_path / "lost+found"):
        one.mkdir(parents=True)
    scandir = os.scandir

    def scanned(path: Any) -> Any:
        if Path(path) in (theirs, tmp_path / "lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scanned)
    files = BlockFiles(str(tmp_path), LAYOUT, 10, 1000)
    files.write(b"\3" * 16, torch.ones(10, dtype=torch.uint8))
    assert files.known() == {b"\3" * 16}


def test_a_folder_that_was_deleted_is_made_again(stored: Callable[..., Stored], tmp_path: Path) -> None:
    engine = stored()
    for index, prompt in enumerate(prompts(2, first=40)):
        shutil.rmtree(tmp_path / "kv")
        if index:
            engine.now += folders.LOOK_S + 1
        asked(engine, prompt, f"r{index}")
    later = stored()
    assert asked(later, prompts(2, first=40)[1]) == alone("llama", prompts(2, first=40)[1], 12)
    assert later.received == 28


def test_processes_with_one_number_write_the_same_block_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main processes of two pods both are process 1."""
    one, other = (BlockFiles(str(tmp_path), LAYOUT, 10, 1000) for _ in range(2))
    content, body = b"\3" * 16, torch.ones(10, dtype=torch.uint8)
    replace = os.replace

    def beside(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        other.write(content, body)
        replace(source, target)

    monkeypatch.setattr(os, "replace", beside)
    one.write(content, body)
    assert one.read(content).tolist() == [1] * 10
    assert len(list(one._folder.iterdir())) == 1


@pytest.mark.parametrize("waiting", [1.5, 0.5], ids=["some blocks", "less than a block"])
def test_of_a_step_with_more_blocks_than_may_wait_the_first_ones_are_kept(
    stored: Callable[..., Stored], monkeypatch: pytest.MonkeyPatch, waiting: float
) -> None:
    engine = stored()
    monkeypatch.setattr(folders, "UNWRITTEN_NBYTES", int(waiting * engine.nbytes))
    asked(engine)
    assert engine.engine.preprocess_add_request(_request(PROMPT)).hash(4)[0] in engine.connector._known
    assert engine.connector._unwritten == 0


def test_a_prompt_whose_probabilities_are_asked_for_leaves_no_files_that_nobody_finds(
    stored: Callable[..., Stored], tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    assert asked(stored(), params=params) == alone("llama", PROMPT, 12)
    assert _files(tmp_path) == []


def test_a_header_of_another_layout_or_block_is_refused_whatever_its_checksum(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), LAYOUT, 4, 1000)
    name, body = b"\5" * 16, b"abcd"
    for header in (b"OMNIKV01" + b"\2" * 8 + name, b"OMNIKV01" + LAYOUT + b"\6" * 16):
        check = zlib.crc32(body, zlib.crc32(header)).to_bytes(4, "little")
        files._path(name).write_bytes(header + check + body)
        with pytest.raises(ProtocolError, match="was deleted"):
            files.read(name)
        assert not files._path(name).exists()


def test_a_full_disk_costs_no_answer(stored: Callable[..., Stored], caplog: pytest.LogCaptureFixture) -> None:
    engine = stored()

    def full(content: bytes, flat: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine.files.write = full  # type: ignore[method-assign]
    found = [asked(engine), asked(engine, prompts(1, first=40)[0], "s")]
    assert found == [alone("llama", prompt, 12) for prompt in (PROMPT, prompts(1, first=40)[0])]
    assert [one.message for one in caplog.records if "not kept" in one.message] == [
        "blocks are not kept in the folder: OSError: [Errno 28] No space left on device"
    ]
    assert (engine.connector._unwritten, engine.connector._known) == (0, set())


def test_a_disk_that_gives_nothing_is_given_up_and_what_it_gives_later_lands_nowhere(
    stored: Callable[..., Stored],
) -> None:
    asked(stored())
    later, go_on = stored(), threading.Event()
    read = later.files.read

    def frozen(content: bytes) -> Any:
        assert go_on.wait(60)
        return read(content)

    later.files.read = frozen  # type: ignore[method-assign]
    later.ask("r", PROMPT)
    for _ in range(5):
        later.turn()
    later.connector.look()
    assert not later.finish and not later.engine.has_work()
    later.now += folders.PATIENCE_S + 1
    later.connector.look()
    for _ in range(60):
        later.turn()
    assert later.tokens["r"] == alone("llama", PROMPT, 12)
    go_on.set()
    later.rest()
    assert later.received == 0
    assert later.engine.scheduler.pool.free == later.engine.scheduler.pool.capacity


def test_an_abort_while_blocks_are_read_frees_all(stored: Callable[..., Stored]) -> None:
    asked(stored())
    later = stored()
    later.ask("r", PROMPT)
    later.engine.abort_requests(["r"])
    later.rest()
    assert later.engine.scheduler.pool.free == later.engine.scheduler.pool.capacity
    del later.tokens["r"]
    assert asked(later, name="s") == alone("llama", PROMPT, 12)


def test_many_prompts_through_a_small_cache_are_answered_right(stored: Callable[..., Stored]) -> None:
    for _ in range(2):
        engine = stored(blocks=24, max_requests=6)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for index, prompt in enumerate(prompts(8, 33)):
            engine.ask(f"r{index}", prompt, params)
        engine.run()
        for index, prompt in enumerate(prompts(8, 33)):
            assert engine.tokens[f"r{index}"] == alone("llama", prompt, 20)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_folder": "relative"}, r"kv_folder='relative'\): expected an absolute path"),
        ({"kv_folder": "/x", "engine": "vllm"}, "engine='vllm' keeps no blocks there"),
        ({"kv_folder": "/x", "prefix_caching": False}, "found as a prefix"),
        ({"kv_folder_bytes": 0}, r"kv_folder_bytes=0\): a number of bytes"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        folders.check(Autoregressive(model="tiny", **fields), "")


def test_a_folder_or_a_model_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = core()
    runner: Any = made.executor.call(lambda one: one).result()

    def connect(fields: dict[str, Any], runner: Any = runner) -> None:
        loaded = SimpleNamespace(core=made, runner=runner, weights="")
        spec = Autoregressive(model="tiny", block_size=4, **fields)
        registry.connect(spec, loaded, registry.Around(post=lambda one: None))

    with pytest.raises(ConfigurationError, match=r"kv_folder=.*file"):
        connect({"kv_folder": str(tmp_path / "file")})
    with pytest.raises(ConfigurationError, match=r"kv_folder_bytes=10\): a block of this model has \d+ bytes"):
        connect({"kv_folder": str(tmp_path / "kv"), "kv_folder_bytes": 10})
    assert "lfm2" in STATEFUL
    other: Any = core("lfm2", prefix_caching=False).executor.call(lambda one: one).result()
    with pytest.raises(ConfigurationError, match="Lfm2ForCausalLM keeps state beside attention, which is not in its"):
        connect({"kv_folder": str(tmp_path / "kv")}, other)
    made.shutdown()


@pytest.mark.timeout(300)
async def received_tokens(client: httpx.AsyncClient) -> float:
    """The number in the beat that has the answer's tokens: numbers come with beats, after the answer."""

    def number(text: str, name: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if f"engine_{name}{{" in line)

    async with asyncio.timeout(patience(60)):
        while not number(text := (await client.get("/metrics")).text, "generated_tokens_total"):
            await asyncio.sleep(0.1)
    return number(text, "kv_received_tokens_total")


@pytest.mark.long
@pytest.mark.parametrize("own_process", [False, pytest.param(True, marks=pytest.mark.nightly)])
async def test_a_stage_finds_after_a_restart_what_it_had_computed(tmp_path: Path, own_process: bool) -> None:
    """The first life is in this process, the second in a pipeline, which is asked over HTTP, as an author has it."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    spec: dict[str, Any] = {
        "name": "kept",
        "code": {"inline": {"kept.py": STAGE}},
        "stages": [
            {
                "name": "words",
                "process": "words",
                "factory": "kept:words",
                "terminal": True,
                "factoryArgs": {"model": f"{tmp_path}/model", "folder": f"{tmp_path}/kv", "own_process": own_process},
            }
        ],
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    expected = tiny_tokenizer().decode(alone("llama", PROMPT, 8), skip_special_tokens=True)
    made_here: dict[str, Any] = {}
    exec(STAGE, made_here)
    [earlier] = testing.run_stage(made_here["words"], [PROMPT], **spec["stages"][0]["factoryArgs"])
    assert earlier.result == expected
    with tempfile.TemporaryDirectory(prefix="f-") as base:
        overrides = [f"endpoints.basePath={base}"]
        made = LocalPipeline(tmp_path / "pipeline.yaml", overrides=overrides, options=LocalOptions(port=0))
        async with made as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            answer = (await client.post("/v1/pipeline", json={"inputs": PROMPT})).json()
            assert answer["results"]["words"] == expected
            assert await received_tokens(client) == 16


STAGE = """
import stage_runtime as omni

def words(model, folder, own_process):
    return omni.Autoregressive(
        model=model, kv_folder=folder, own_process=own_process, kernels="torch",
        prompt=lambda payload: omni.Prompt(tokens=payload.data),
        deliver=lambda payload, made: [omni.Result(made.answer)] if made.finish is not None else [],
        params={"max_tokens": 8, "temperature": 0, "ignore_eos": True},
    )
"""
