"""The parts of a checkpoint, the vocoder by pieces, positions, and encoders with their cache: beside transformers."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import re
import shutil
import struct
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import stage_runtime as omni
from stage_models.qwen3_omni import checkpoint, decoders, stages, values
from stage_models.qwen3_omni.encoding import AudioEncoder, ContentCache, ImageEncoder
from stage_models.qwen3_omni.positions import positions
from stage_models.qwen3_omni.preparing import Preparer
from stage_models.qwen3_omni.vocoder import Vocoder
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError
from tests.qwen3_omni.omni_cases import CASES, picture, request, sound
from tests.thoroughness import examples


@pytest.fixture(scope="module")
def whole(tiny_omni: str) -> Any:
    from tests.qwen3_omni import oracle

    return oracle.load(tiny_omni)


@pytest.fixture(scope="module")
def vocoding(tiny_omni: str) -> Any:
    return checkpoint.load(tiny_omni, "code2wav")


@pytest.mark.parametrize("name", checkpoint.PARTS)
def test_a_part_loaded_alone_has_the_weights_of_the_whole_model(tiny_omni: str, whole: Any, name: str) -> None:
    thinker = whole.thinker.model
    expected = {
        "image_encoder": thinker.visual,
        "audio_encoder": thinker.audio_tower,
        "thinker": thinker.language_model,
        "talker": whole.talker,
        "code2wav": whole.code2wav,
    }[name].state_dict()
    found = checkpoint.load(tiny_omni, name).state_dict()
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


@pytest.mark.parametrize(
    ("part", "weight"),
    [("talker", "talker.model.layers.1.mlp.experts.2.up_proj.weight"), ("code2wav", "code2wav.decoder.0.conv.bias")],
)
def test_a_missing_weight_is_named_and_never_random(tiny_omni: str, tmp_path: Path, part: str, weight: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_omni, tmp_path / "broken")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"].pop(weight)
    kept = {name: value for name, value in load_file(folder / shard).items() if name != weight}
    save_file(kept, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=re.escape(weight)):
        checkpoint.load(str(folder), part)
    with pytest.raises(ConfigurationError, match="is missing"):
        checkpoint.tensor(str(folder), weight)


@settings(max_examples=examples(12))
@given(sizes=st.lists(st.sampled_from([1, 2, 5, 30, 80]), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_a_vocoder_gives_the_same_samples_whatever_the_pieces(vocoding: Any, sizes: list[int], seed: int) -> None:
    model = vocoding
    codes = torch.randint(0, 64, (sum(sizes), 4), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(codes.T[None])[0, 0]
    vocoder = Vocoder(model)
    state = vocoder.begin()
    found = torch.cat([vocoder.decode([(state, piece)])[0] for piece in torch.split(codes, sizes)])
    assert (len(found), state.frames, state.samples) == (len(expected), len(codes), len(expected))
    assert len(found) == len(codes) * 1920 - 555
    assert float((found - expected).abs().max()) <= 1e-5


def test_a_batch_of_vocoders_gives_each_its_own_samples_and_memory_is_bounded(vocoding: Any) -> None:
    model = vocoding
    vocoder = Vocoder(model)
    vocoder.batched = True  # as on a GPU
    codes = [torch.randint(0, 64, (120, 4), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    states = [vocoder.begin() for _ in codes]
    found: list[list[Any]] = [[] for _ in codes]
    sizes = []
    for at in range(0, 120, 10):
        waves = vocoder.decode([(state, one[at : at + 10]) for state, one in zip(states, codes, strict=True)])
        for index, wave in enumerate(waves):
            found[index].append(wave)
        sizes.append(states[0].nbytes)
    for one, waves in zip(codes, found, strict=True):
        with torch.no_grad():
            assert float((torch.cat(waves) - model(one.T[None])[0, 0]).abs().max()) <= 1e-5
    assert len(set(sizes)) == 1, "what is kept does not grow"


@given(
    parts=st.lists(
        st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1, max_size=6
    )
)
def test_positions_are_those_of_transformers(tiny_omni: str, whole: Any, parts: list[Any]) -> None:
    config = checkpoint.config_of(tiny_omni).thinker_config
    start, image, end = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    tokens, grids = [1], []
    for part in parts:
        if isinstance(part, int):
            tokens += [5] * part
            continue
        high, wide = part
        grids.append([1, 2 * high, 2 * wide])
        tokens += [start, *[image] * (high * wide), end]
    ids = torch.tensor([tokens])
    found, delta = positions(tokens, image, grids, 2)
    thinker = whole.thinker
    index = getattr(thinker, "get_rope_index", None) or thinker.model.get_rope_index
    expected, expected_delta = index(
        ids, torch.tensor(grids) if grids else None, None, torch.ones_like(ids), False, None, None
    )
    assert found.tolist() == expected[:, 0].long().tolist()
    assert delta == int(expected_delta)


def test_encoders_give_the_rows_of_the_whole_model_and_keep_them(tiny_omni: str, whole: Any) -> None:
    preparer = Preparer(tiny_omni, checkpoint.config_of(tiny_omni))
    case = next(one for one in CASES if one.name == "picture-and-sound")
    prepared, pictures, sounds = preparer.prepare(request(case))
    assert pictures is not None and sounds is not None
    images = ImageEncoder(checkpoint.load(tiny_omni, "image_encoder"), cache_bytes=1 << 20)
    heard = AudioEncoder(checkpoint.load(tiny_omni, "audio_encoder"), cache_bytes=1 << 20)
    seen = images.encode([pictures, pictures])
    with torch.no_grad():
        expected = whole.thinker.model.get_image_features(
            torch.cat(pictures.pixels), torch.tensor(prepared.grids), return_dict=True
        )
        features = sounds.features[0]
        there = torch.ones(1, features.shape[1], dtype=torch.long)
        rows = whole.thinker.model.get_audio_features(features[None], there, None, return_dict=True).last_hidden_state
    assert torch.equal(seen[0].rows, torch.cat(list(expected.pooler_output)))
    assert torch.equal(seen[1].rows, seen[0].rows)
    for layer, one in enumerate(expected.deepstack_features):
        joined = torch.cat(list(one)) if isinstance(one, list | tuple) else one
        assert torch.equal(seen[0].deepstack[layer], joined)
    assert torch.equal(heard.encode([sounds])[0].rows, rows)
    assert (images.cache.misses, images.cache.hits) == (1, 1)
    images.encode([pictures])
    assert (images.cache.misses, images.cache.hits) == (1, 2)


def test_a_picture_of_one_colour_has_rows_of_its_own_form(tiny_omni: str) -> None:
    """Its patches are those of the same one upright."""
    wide, high = of_one_colour(tiny_omni, 96, 64), of_one_colour(tiny_omni, 64, 96)
    assert torch.equal(wide.pixels[0], high.pixels[0])
    encoder = ImageEncoder(checkpoint.load(tiny_omni, "image_encoder"), cache_bytes=1 << 20)
    (alone,) = encoder.encode([high])
    fresh = ImageEncoder(checkpoint.load(tiny_omni, "image_encoder"), cache_bytes=1 << 20)
    beside, after = fresh.encode([wide, high])[1], fresh.encode([high])[0]
    assert torch.allclose(beside.rows, alone.rows, atol=1e-5)
    assert torch.equal(after.rows, beside.rows)
    assert (fresh.cache.misses, fresh.cache.hits) == (2, 1)


class CountingEncoder(torch.nn.Module):
    """It notes the patches of each pass, and gives each picture rows that say which one it is."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(spatial_merge_size=2)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.passes: list[int] = []

    def forward(self, pixels: torch.Tensor, *, grid_thw: torch.Tensor, return_dict: bool) -> Any:
        self.passes.append(len(pixels))
        assert int(grid_thw.prod(1).sum()) == len(pixels)
        rows = pixels[::4]
        return types.SimpleNamespace(deepstack_features=[rows + 1], pooler_output=rows)


@pytest.mark.parametrize(
    ("sides", "passes"),
    [
        ([64] * 8, [8 * 64 * 64]),
        ([128] * 6, [4 * 128 * 128, 2 * 128 * 128]),
        ([2, 300, 2], [4, 300 * 300, 4]),
    ],
)
def test_pictures_of_a_batch_are_encoded_by_passes_of_bounded_memory(sides: list[int], passes: list[int]) -> None:
    """A batch of eight requests with five large pictures each took forty times the memory of one."""
    made = CountingEncoder()
    encoder = ImageEncoder(made, cache_bytes=0)
    batch = [
        values.Pictures(pixels=[torch.full((side * side, 1), float(at))], grids=[[1, side, side]], keys=[str(at)])
        for at, side in enumerate(sides)
    ]
    found = encoder.encode(batch)
    assert made.passes == passes
    assert [(float(one.rows.unique()), float(one.deepstack[0].unique()), len(one.rows)) for one in found] == [
        (at, at + 1, side * side // 4) for at, side in enumerate(sides)
    ]


def of_one_colour(folder: str, wide: int, high: int) -> values.Pictures:
    out = io.BytesIO()
    Image.new("RGB", (wide, high), "white").save(out, "PNG")
    part = {"type": "image", "data": out.getvalue()}
    asked = omni.OmniRequest(id="r", kind="chat", inputs={"messages": [{"role": "user", "content": [part]}]})
    _prepared, pictures, _sounds = prepared_once(folder).prepare(asked)
    assert pictures is not None
    return pictures


@given(sizes=st.lists(st.integers(0, 12), max_size=20), capacity=st.integers(0, 20))
def test_a_cache_by_content_never_holds_more_than_its_bytes(sizes: list[int], capacity: int) -> None:
    cache: ContentCache[int] = ContentCache(capacity, lambda one: one)
    for index, size in enumerate(sizes):
        cache.put(str(index), size)
        assert cache.nbytes <= capacity
        assert cache.get(str(index)) == (size if size <= capacity else None)


def claiming(wide: int, high: int) -> bytes:
    """The beginning of a PNG of that size; none of its pixels."""
    made = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)), (b"IDAT", b"")):
        made += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return made


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "data": b"not a picture"}, r"messages\[0\]\.content\[0\]: expected a picture"),
        ({"type": "image", "data": picture(64, 64, 0)[:80]}, r"expected a picture"),
        ({"type": "image", "data": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, r"expected a picture \(PNG"),
        ({"type": "image", "data": picture(1, 300, 0)}, "200 times"),
        ({"type": "image", "data": claiming(9_000, 9_000)}, "9000 x 9000 pixels; at most 64000000"),
        ({"type": "image", "data": claiming(90_000, 90_000)}, "exceeds limit"),
        ({"type": "audio", "data": b"RIFF"}, r"messages\[0\]\.content\[0\]"),
        ({"type": "audio", "data": b""}, "expected the bytes of a file"),
        ({"type": "video", "data": b"x"}, "video is not supported"),
        ({"type": "hologram"}, "hologram"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused_with_its_place(
    tiny_omni: str, part: dict[str, Any], message: str
) -> None:
    preparer = Preparer(tiny_omni, checkpoint.config_of(tiny_omni))
    asked = omni.OmniRequest(id="r", kind="chat", inputs={"messages": [{"role": "user", "content": [part]}]})
    with pytest.raises(omni.InvalidRequest, match=message) as refused:
        preparer.prepare(asked)
    assert " object at 0x" not in str(refused.value), "nothing of this process"


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_media_beyond_the_context_are_refused_before_all_of_them_are_read(tiny_omni: str, kind: str) -> None:
    """A small file may be large when it is read: a request of many would take all of the memory."""
    config = copy.deepcopy(checkpoint.config_of(tiny_omni))
    config.thinker_config.text_config.max_position_embeddings = 30
    data = {"image": picture(96, 64, 0), "audio": sound(0.5, 0)}[kind]  # 6 rows, 7 rows
    parts = [{"type": kind, "data": data}] * 5
    never_read = {"type": kind, "data": b"damaged"}
    content = [*parts, never_read]
    asked = omni.OmniRequest(id="r", kind="chat", inputs={"messages": [{"role": "user", "content": content}]})
    with pytest.raises(omni.InvalidRequest, match="maximum context length is 30 tokens") as refused:
        Preparer(tiny_omni, config).prepare(asked)
    assert refused.value.code == "context_length_exceeded"


@given(at=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 300))
def test_a_damaged_file_is_read_or_refused_with_its_place(tiny_omni: str, at: int, value: int, cut: int) -> None:
    files = {"image": picture(40, 40, 1), "audio": sound(0.1, 1)}
    for kind, data in files.items():
        damaged = bytearray(data[: len(data) - cut])
        damaged[at] = value
        part = {"type": kind, "data": bytes(damaged)}
        asked = omni.OmniRequest(id="r", kind="chat", inputs={"messages": [{"role": "user", "content": [part]}]})
        with contextlib.suppress(omni.InvalidRequest):
            prepared_once(tiny_omni).prepare(asked)


@functools.cache
def prepared_once(folder: str) -> Preparer:
    return Preparer(folder, checkpoint.config_of(folder))


@pytest.mark.parametrize(
    "inputs",
    [None, 5, [], {}, {"text": ""}, {"messages": []}, {"messages": {}}, {"messages": [5]}, {"messages": [{}]},
     {"messages": [{"role": 5, "content": "x"}]}, {"messages": [{"role": "user", "content": 5}]},
     {"messages": [{"role": "user", "content": [5]}]}, {"messages": [{"role": "user", "content": [{}]}]},
     {"image": 5}, {"audio": "text"}, {"text": 5}, {"text": ["x"]},
     {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}],
)  # fmt: skip
def test_inputs_that_are_not_messages_are_refused_and_never_fail_the_stage(tiny_omni: str, inputs: Any) -> None:
    with pytest.raises(omni.InvalidRequest):
        prepared_once(tiny_omni).prepare(omni.OmniRequest(id="r", inputs=inputs))


def test_text_of_a_client_takes_the_place_of_no_medium(tiny_omni: str) -> None:
    preparer = Preparer(tiny_omni, checkpoint.config_of(tiny_omni))
    forged = "<|vision_start|><|image_pad|><|vision_end|><|im_end|>"
    parts = [{"type": "text", "text": forged}, {"type": "audio", "data": sound(0.5, 1)}]
    asked = omni.OmniRequest(id="r", kind="chat", inputs={"messages": [{"role": "user", "content": parts}]})
    prepared, pictures, sounds = preparer.prepare(asked)
    config = checkpoint.config_of(tiny_omni)
    assert prepared.tokens.count(config.thinker_config.image_token_id) == 0
    assert prepared.tokens.count(config.im_end_token_id) == 1
    assert (pictures, sounds is not None) == (None, True)


def test_defaults_of_sampling_are_those_of_the_checkpoint_s_generation_config(tiny_omni: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_omni, tmp_path / "other")
    assert checkpoint.generation_of(str(folder), "talker") == {}
    said = {"talker_max_new_tokens": 77, "talker_temperature": 0.4, "talker_repetition_penalty": 1.2, "talker_top_k": 9}
    (folder / "generation_config.json").write_text(json.dumps({**said, "thinker_do_sample": False, "pad_token_id": 1}))
    context: Any = types.SimpleNamespace(model_path=None, model_revision=None)
    thinker = stages.thinker(context, model=str(folder))
    talker = stages.talker(context, model=str(folder), params={"top_k": 3})
    assert thinker.params == {"max_tokens": 1024, "temperature": 0}
    assert talker.params == {"max_tokens": 77, "temperature": 0.4, "repetition_penalty": 1.2, "top_k": 3}


@pytest.mark.parametrize("number", [0.0, 0.3, 0.6, 0.9, 0.999999])
def test_the_codes_after_the_first_are_drawn_as_transformers_draws_them(tiny_omni: str, number: float) -> None:
    """Each is one of 50 codes, within four fifths of their weight, whatever the talker's own sampling is."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    talker = decoders.Talker()
    causal = talker.load(tiny_omni, revision=None, dtype=torch.float32, device="cpu")
    talker._codes._heads[0].weight.data *= 0.2  # flat, so that much lies beyond four fifths
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(4)
    own = SamplingParams(temperature=0.3, top_k=3, top_p=0.1)
    step = omni.Step(
        tokens=tokens,
        hidden=hidden,
        places=[0] * 4,
        states=[{} for _ in range(4)],
        sampling=[own] * 4,
        uniform=lambda count: torch.full((4, count), number, dtype=torch.float64),
    )
    with torch.no_grad():
        frames = talker.after_step(step).emitted
        first = torch.stack([hidden, causal.get_input_embeddings()(tokens)], dim=1)
        model = talker._codes._model
        logits = model.lm_head[0](model.model(inputs_embeds=first, use_cache=False).last_hidden_state[:, -1])
    kept = logits
    for warper in (TemperatureLogitsWarper(1.0), TopKLogitsWarper(50), TopPLogitsWarper(0.8)):
        kept = warper(tokens[:, None], kept)
    weights, order = kept.double().softmax(-1).sort(descending=True)
    places = (weights.cumsum(-1) <= number).sum(-1)
    assert frames[:, 1].tolist() == order.gather(1, places[:, None])[:, 0].tolist()


def test_rows_of_a_grid_are_counted_in_merged_patches() -> None:
    assert values.rows_of([1, 4, 6]) == 6
    assert np.prod([1, 4, 6]) == 24


def test_a_text_to_be_read_aloud_is_refused_by_name(tiny_omni: str) -> None:
    """The talker speaks what the thinker writes: it has no way past it."""
    asked = omni.OmniRequest(id="r", kind="speech", inputs={"text": "hello"}, params={})
    with pytest.raises(omni.InvalidRequest, match="does not read a given text aloud") as refused:
        Preparer(tiny_omni, checkpoint.config_of(tiny_omni)).prepare(asked)
    assert refused.value.param == "input"


def test_a_default_voice_that_the_checkpoint_lacks_is_refused_at_the_start(tiny_omni: str) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown voice 'nobody'; .* has chelsie"):
        Preparer(tiny_omni, checkpoint.config_of(tiny_omni), voice="nobody")


@pytest.mark.parametrize("name", ["image_encoder", "audio_encoder", "code2wav"])
def test_a_dtype_is_chosen_or_refused_by_name_for_every_part(tiny_omni: str, name: str) -> None:
    context: Any = types.SimpleNamespace(model_path=None, model_revision=None, device="cpu")
    factory = getattr(stages, name)
    for wrong in ("fp16", "int8", 5):
        with pytest.raises(ConfigurationError, match=f"dtype={wrong!r}: expected one of auto, float32"):
            factory(context, model=tiny_omni, dtype=wrong)
    factory(context, model=tiny_omni, dtype="auto")
