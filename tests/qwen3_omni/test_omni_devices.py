"""Parts of Qwen3-Omni on a device beside the same parts on the CPU: rows, samples, text and frames."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stage_models.qwen3_omni import checkpoint, decoders
from stage_models.qwen3_omni.encoding import AudioEncoder, ImageEncoder
from stage_models.qwen3_omni.preparing import Preparer
from stage_models.qwen3_omni.vocoder import Vocoder
from tests.qwen3_omni.omni_cases import CASES, request

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
CLOSE = 1e-3  # of float32 sums in another order, with a GPU's own convolutions


def there(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@DEVICES
def test_pieces_of_many_requests_in_one_pass_are_those_of_one_whole_decode(tiny_omni: str, device: str) -> None:
    there(device)
    model = checkpoint.load(tiny_omni, "code2wav")
    vocoder = Vocoder(checkpoint.load(tiny_omni, "code2wav", device=device))
    vocoder.batched = True
    codes = [torch.randint(0, 64, (40, 4), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    states = [vocoder.begin() for _ in codes]
    waves: list[list[Any]] = [[] for _ in codes]
    for start, end in ((0, 4), (4, 12), (12, 28), (28, 40)):
        found = vocoder.decode([(state, one[start:end]) for state, one in zip(states, codes, strict=True)])
        for index, wave in enumerate(found):
            waves[index].append(wave)
    for one, parts in zip(codes, waves, strict=True):
        with torch.no_grad():
            whole = model(one.T[None])[0, 0]
        assert torch.cat(parts).shape == whole.shape
        assert float((torch.cat(parts) - whole).abs().max()) <= CLOSE


@DEVICES
def test_encoders_give_the_rows_that_they_give_on_a_cpu(tiny_omni: str, device: str) -> None:
    there(device)
    case = next(one for one in CASES if one.name == "picture-and-sound")
    _prepared, pictures, sounds = Preparer(tiny_omni, checkpoint.config_of(tiny_omni)).prepare(request(case))
    assert pictures is not None and sounds is not None
    rows = []
    for where in ("cpu", device):
        images = ImageEncoder(checkpoint.load(tiny_omni, "image_encoder", device=where), cache_bytes=0)
        ears = AudioEncoder(checkpoint.load(tiny_omni, "audio_encoder", device=where), cache_bytes=0)
        (seen,), (heard,) = images.encode([pictures]), ears.encode([sounds])
        rows.append([seen.rows, *seen.deepstack, heard.rows])
    for one, other in zip(*rows, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= CLOSE


@DEVICES
def test_the_code_predictor_gives_the_frames_that_it_gives_on_a_cpu(tiny_omni: str, device: str) -> None:
    there(device)
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(6)
    frames = []
    for where in ("cpu", device):
        talker = decoders.Talker()
        talker.load(tiny_omni, revision=None, dtype=torch.float32, device=where)
        with torch.no_grad():
            frames.append(talker.after_step(_step(tokens.to(where), hidden.to(where))).emitted.cpu())
    assert torch.equal(*frames)
    assert frames[0].shape == (6, 4) and torch.equal(frames[0][:, 0], tokens)


def _step(tokens: Any, hidden: Any) -> Any:
    import types

    greedy = types.SimpleNamespace(greedy=True)
    return types.SimpleNamespace(tokens=tokens, hidden=hidden, sampling=[greedy] * len(tokens))
