"""Sound in and out of formats: each round trip is decoded by libsndfile and compared with what went in.

The codecs run in the test's process here; `test_http_codecs` has them in theirs.
"""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.sound import formats
from stage_runtime.web.sound.codecs import encoding, samples
from stage_runtime.web.sound.codecs.resampling import Resampler
from stage_runtime.wire.values import Audio, RawTensor
from tests.thoroughness import examples


def tone(rate: int, *, seconds: float = 1.0, hertz: float = 440.0, channels: int = 0) -> np.ndarray:
    times = np.arange(int(rate * seconds)) / rate
    wave_form = (0.5 * np.sin(2 * np.pi * hertz * times)).astype(np.float32)
    return wave_form if not channels else np.stack([wave_form] * channels, axis=1)


def pitch(sound: np.ndarray, rate: int) -> float:
    """The strongest frequency of the middle half."""
    middle = sound[len(sound) // 4 : 3 * len(sound) // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    return float(np.argmax(spectrum) * rate / len(middle))


def loudness(sound: np.ndarray) -> float:
    middle = sound[len(sound) // 4 : 3 * len(sound) // 4]
    return float(np.sqrt(np.mean(middle.astype(np.float64) ** 2)))


def streamed(format: str, pieces: list[Audio]) -> bytes:
    return _all(encoding.encoder(format), pieces)


def encoded(format: str, pieces: list[Audio]) -> bytes:
    return _all(encoding.Whole(format), pieces)


def _all(made: encoding.Encoder, pieces: list[Audio]) -> bytes:
    return b"".join([*(made.write(samples.flat(piece)) for piece in pieces), made.close()])


def read(audio: Audio, stage: str | None = None) -> np.ndarray:
    return samples.read(samples.flat(audio, stage=stage))


def in_pieces(sound: np.ndarray, rate: int, length: int) -> list[Audio]:
    return [Audio(sound[start : start + length], rate) for start in range(0, len(sound), length)]


@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 44_100])
@pytest.mark.parametrize("format", ["mp3", "opus", "flac", "wav"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_tone_comes_back_with_its_pitch_length_and_loudness(format: str, rate: int, whole: bool) -> None:
    sound = tone(rate)
    pieces = in_pieces(sound, rate, 1234)
    data = encoded(format, pieces) if whole else streamed(format, pieces)
    # a wav that is sent while it grows says that it is as long as can be: read what is there, as players do
    back = np.concatenate(list(soundfile.SoundFile(io.BytesIO(data)).blocks(4096, dtype="float32")))
    back_rate = soundfile.info(io.BytesIO(data)).samplerate
    # an mp3 that is sent while it grows has no index to cut the coder's delay off: a few frames of silence
    slack_s = 0.15 if format == "mp3" and not whole else 0.001
    assert abs(len(back) / back_rate - 1.0) <= slack_s
    assert abs(pitch(back, back_rate) - 440) < 5
    assert loudness(back) == pytest.approx(loudness(sound), rel=0.06)  # LAME leaves 5 % of headroom


def test_pcm_is_24_khz_mono_16_bit_whatever_the_voice_speaks() -> None:
    data = encoded("pcm", in_pieces(tone(16_000, channels=2), 16_000, 999))
    back = np.frombuffer(data, "<i2").astype(np.float32) / 32767
    assert len(back) == 24_000
    assert abs(pitch(back, 24_000) - 440) < 5


def test_a_streamed_wav_is_the_whole_one_but_for_its_sizes() -> None:
    pieces = in_pieces(tone(16_000), 16_000, 1000)
    whole, piecewise = encoded("wav", pieces), streamed("wav", pieces)
    assert whole[44:] == piecewise[44:]
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels(), file.getsampwidth()) == (
            16_000,
            16_000,
            1,
            2,
        )
    assert piecewise[4:8] == piecewise[40:44] == b"\xff\xff\xff\xff"


def test_wav_and_pcm_give_each_piece_at_once_and_mp3_before_the_end() -> None:
    for format in ("wav", "pcm", "mp3"):
        made = encoding.encoder(format)
        first = made.write(samples.flat(Audio(tone(24_000, seconds=0.5), 24_000)))
        assert len(first) > 1000, format


def test_no_pieces_are_no_bytes() -> None:
    assert [encoded(format, []) for format in formats.FORMATS] == [b""] * len(formats.FORMATS)


def test_a_voice_that_changes_its_rate_is_heard_at_one_rate() -> None:
    pieces = [Audio(tone(24_000), 24_000), Audio(tone(16_000), 16_000), Audio(tone(24_000), 24_000)]
    back, rate = soundfile.read(io.BytesIO(encoded("wav", pieces)))
    assert (rate, len(back)) == (24_000, 72_000)
    assert abs(pitch(back[24_000:48_000], rate) - 440) < 5


def test_aac_is_refused_with_what_can_be_had() -> None:
    with pytest.raises(InvalidRequest) as caught:
        formats.check("aac", param="response_format")
    assert caught.value.message == "response_format: 'aac' is not available; there are mp3, opus, flac, wav, pcm"
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([0.5, -0.5], np.float32), [0.5, -0.5]),
        (np.array([0.5, -0.5], np.float64), [0.5, -0.5]),
        (np.array([1 << 14, -(1 << 14)], np.int16), [0.5, -0.5]),
        (np.array([192, 64], np.uint8), [0.5, -0.5]),
        (RawTensor("float32", (2,), np.array([0.5, -0.5], np.float32).tobytes()), [0.5, -0.5]),
        (RawTensor("float16", (2,), np.array([0.5, -0.5], np.float16).tobytes()), [0.5, -0.5]),
        (RawTensor("bfloat16", (2,), bytes.fromhex("003f00bf")), [0.5, -0.5]),
        ([0.5, -0.5], [0.5, -0.5]),
    ],
)
def test_samples_of_any_dtype_are_read_as_floats(value: object, expected: list[float]) -> None:
    floats = read(Audio(value, 16_000))
    assert (floats.dtype, floats.shape) == (np.dtype(np.float32), (2, 1))
    assert floats[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("audio", "problem"),
    [
        (Audio(np.zeros((2, 2, 2), np.float32), 16_000), "shape [2, 2, 2] is neither"),
        (Audio(np.zeros((2, 90), np.float32), 16_000), "shape [2, 90] is neither"),
        (Audio(np.zeros(2, np.complex64), 16_000), "dtype complex64"),
        (Audio(RawTensor("float8_e4m3fn", (2,), b"ab"), 16_000), "dtype float8_e4m3fn"),
        (Audio(np.zeros(2, np.float32), 0), "sample_rate 0"),
        (Audio(np.zeros(2, np.float32), -1), "sample_rate -1"),
        (Audio(np.zeros(2, np.float32), 10**5000), "sample_rate beyond 64 bits"),
        (Audio(np.zeros(2, np.float32), 16_000.5), "sample_rate 16000.5"),  # type: ignore[arg-type]
        (Audio(np.zeros(2, np.float32), float("nan")), "sample_rate nan"),  # type: ignore[arg-type]
        (Audio(np.zeros(2, np.float32), True), "sample_rate True"),
        (Audio(np.zeros(2, np.float32), "16000"), "sample_rate '16000'"),  # type: ignore[arg-type]
        (Audio(np.zeros(2, np.float32), None), "sample_rate NoneType"),  # type: ignore[arg-type]
        (Audio(np.zeros((2, 0), np.float32), 16_000), "shape [2, 0]"),
        (Audio(np.zeros((), np.float32), 16_000), "shape []"),
        (Audio(RawTensor("float32", (3,), b"12345678"), 16_000), "8 bytes are not float32 of shape [3]"),
        (Audio("hello", 16_000), "dtype str"),
        (Audio(None, 16_000), "dtype object"),
        (Audio({"a": 1}, 16_000), "dtype object"),
        (Audio([[1.0], [1.0, 2.0]], 16_000), "list: "),
        (Audio([10**400], 16_000), "dtype object"),
    ],
)
def test_what_is_no_sound_fails_the_request_naming_stage_and_problem(audio: Audio, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(audio, stage="voice")
    assert (caught.value.code, caught.value.stage) == ("stage_failed", "voice")
    assert problem in caught.value.message


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_is_too_loud_is_clipped_and_nan_is_silence(dtype: type[np.floating[Any]]) -> None:
    loud: np.ndarray[Any, Any] = np.array([2.0, -2.0, np.nan, np.inf, -np.inf, np.finfo(dtype).max, -0.5], dtype)
    assert read(Audio(loud, 16_000))[:, 0].tolist() == [1.0, -1.0, 0.0, 1.0, -1.0, 1.0, -0.5]


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("rate", [16_000, 22_050, 44_100])
def test_no_format_wraps_around_or_dies_on_what_is_no_sound(format: str, rate: int) -> None:
    """Full scale through a resampler overshoots; an integer that wraps around would be a click of full scale."""
    square = np.sign(tone(rate, hertz=100)) * 1e9
    square[rate // 2 : rate // 2 + 50] = np.nan
    data = encoded(format, [Audio(square, rate)])
    back = np.frombuffer(data, "<i2") / 32768 if format == "pcm" else soundfile.read(io.BytesIO(data))[0]
    half = back[: len(back) // 4]
    flips = np.count_nonzero(np.abs(np.diff(half)) > 1.0)
    assert flips <= 2 * 100 * 0.25 * 3  # the wave's own, each within a few samples
    assert np.isfinite(back).all()


@settings(max_examples=examples(40), deadline=None)
@given(
    source=st.sampled_from([8000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000]),
    target=st.sampled_from([8000, 16_000, 24_000, 48_000]),
    cuts=st.lists(st.integers(0, 1500), min_size=1, max_size=6),
)
def test_resampling_in_pieces_is_resampling_at_once(source: int, target: int, cuts: list[int]) -> None:
    sound = np.random.default_rng(1).uniform(-1, 1, (sum(cuts), 2)).astype(np.float32)
    at_once = Resampler(source, target, 2)
    expected = np.concatenate([at_once.take(sound), at_once.flush()])
    pieces, start = Resampler(source, target, 2), 0
    made = []
    for length in cuts:
        made.append(pieces.take(sound[start : start + length]))
        start += length
    made.append(pieces.flush())
    assert len(expected) == -(-len(sound) * target // source)
    np.testing.assert_allclose(np.concatenate(made), expected, atol=1e-6)


@pytest.mark.parametrize(("source", "target"), [(16_000, 24_000), (22_050, 24_000), (48_000, 16_000), (44_100, 24_000)])
def test_a_resampled_tone_stays_in_phase_and_what_the_target_cannot_say_is_gone(source: int, target: int) -> None:
    keep = Resampler(source, target, 1)
    back = np.concatenate([keep.take(tone(source, hertz=1000.0)[:, None]), keep.flush()])[:, 0]
    exact = tone(target, hertz=1000.0)
    assert np.max(np.abs(back[1000:-1000] - exact[1000:-1000])) < 1e-3
    if source > target:
        drop = Resampler(source, target, 1)
        beyond = tone(source, hertz=target / 2 * 1.25)[:, None]
        silent = np.concatenate([drop.take(beyond), drop.flush()])
        assert np.max(np.abs(silent[1000:-1000])) < 1e-3
