from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest

import stage_runtime as omni
from stage_models.voice import audio

soundfile = pytest.importorskip("soundfile", reason="the extra `runtime` is not installed")
pytest.importorskip("soxr", reason="the extra `demo` is not installed")


def tone(seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return np.repeat(wave[:, None], channels, axis=1).astype(np.float32)


def encoded(samples: np.ndarray, rate: int, format: str, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=format, subtype=subtype)
    return out.getvalue()


def loudest_hz(samples: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * audio.SAMPLE_RATE / len(samples))


@pytest.mark.parametrize(
    ("format", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", None), ("OGG", "VORBIS"), ("MP3", None)]
)
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2)])
def test_a_file_of_any_kind_becomes_mono_16_khz(format: str, subtype: str | None, rate: int, channels: int) -> None:
    samples = audio.decode(encoded(tone(1.0, rate, channels), rate, format, subtype), max_seconds=2)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert abs(len(samples) - 16_000) < 1_600  # mp3 and ogg pad
    assert abs(loudest_hz(samples) - 440) < 5


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 192_000])
def test_samples_are_those_of_the_whole_file_resampled_at_once(rate: int) -> None:
    import soxr

    for count in (1, 65_536, 65_537, 150_000):
        noise = np.random.default_rng(count).uniform(-0.5, 0.5, (count, 2)).astype(np.float32)
        expected = soxr.resample(noise.mean(axis=1, dtype=np.float32), rate, 16_000)
        assert np.array_equal(audio.decode(encoded(noise, rate, "WAV", "FLOAT"), max_seconds=30), expected)


def test_a_small_file_of_many_channels_and_a_high_rate_takes_little_memory_when_it_is_read() -> None:
    """94 KB took 500 MB."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 192_000, 8, format="FLAC") as file:
        for _second in range(10):
            file.write(np.zeros((192_000, 8), np.float32))
    data = out.getvalue()
    assert len(data) < 50_000
    tracemalloc.start()
    try:
        samples = audio.decode(data, max_seconds=10)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(samples) == 160_000
    assert most < 10_000_000, "ten times the samples that are given, and less than a sixth of those that are read"


@pytest.mark.parametrize("nbytes", [0, 0xFFFFFFFF])
def test_a_wav_that_was_written_to_a_pipe_is_understood(nbytes: int) -> None:
    pytest.importorskip("av", reason="the extra `demo` is not installed")
    whole = encoded(tone(1.0, 16_000), 16_000, "WAV", "PCM_16")
    at = whole.index(b"data") + 4
    samples = audio.decode(whole[:at] + nbytes.to_bytes(4, "little") + whole[at + 4 :], max_seconds=2)
    assert abs(len(samples) - 16_000) < 100
    assert abs(loudest_hz(samples) - 440) < 5


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("webm", "libopus")])
def test_what_phones_and_browsers_record_is_understood(container: str, codec: str) -> None:
    av = pytest.importorskip("av", reason="the extra `demo` is not installed")
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=48_000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(tone(1.0, 48_000).T.copy(), format="fltp", layout="mono")
        frame.sample_rate = 48_000
        for part in (frame, None):
            for packet in stream.encode(part):
                file.mux(packet)
    samples = audio.decode(out.getvalue(), max_seconds=2)
    assert abs(len(samples) - 16_000) < 1_600
    assert abs(loudest_hz(samples) - 440) < 5
    with pytest.raises(omni.InvalidRequest, match=r"longer than the 0\.5 s"):
        audio.decode(out.getvalue(), max_seconds=0.5)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes"),
        (b"This is not sound at all." * 10, "not audio that can be read"),
        (b"\0\0\0\x18ftypM4A " + bytes(100), "not audio that can be read"),
        (b"\x1a\x45\xdf\xa3" + bytes(100), "not audio that can be read"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not audio that can be read"),
        (b"RIFF" + bytes(40), "not audio that can be read"),
    ],
)
def test_what_is_no_sound_is_the_clients_fault(data: bytes, problem: str) -> None:
    with pytest.raises(omni.InvalidRequest, match=problem):
        audio.decode(data, max_seconds=2)


def test_no_python_object_is_shown_to_the_client() -> None:
    with pytest.raises(omni.InvalidRequest) as caught:
        audio.decode(b"garbage", max_seconds=2)
    assert "Format not recognised" in str(caught.value)
    assert "BytesIO" not in str(caught.value)


def test_limits_are_named() -> None:
    with pytest.raises(omni.InvalidRequest, match="longer than the 2 s"):
        audio.decode(encoded(tone(2.1, 16_000), 16_000, "WAV"), max_seconds=2)
    with pytest.raises(omni.InvalidRequest, match="9 channels"):
        audio.decode(encoded(tone(0.1, 16_000, 9), 16_000, "WAV"), max_seconds=2)
    with pytest.raises(omni.InvalidRequest, match="2000 Hz"):
        audio.decode(encoded(tone(0.1, 2_000), 2_000, "WAV"), max_seconds=2)
    with pytest.raises(omni.InvalidRequest, match="no samples"):
        audio.decode(encoded(tone(0.0, 16_000), 16_000, "WAV"), max_seconds=2)


def test_a_header_that_promises_a_terabyte_costs_nothing() -> None:
    lying = bytearray(encoded(tone(0.1, 16_000), 16_000, "WAV", "PCM_16"))
    lying[40:44] = (0xFFFF_FFF0).to_bytes(4, "little")
    assert len(audio.decode(bytes(lying), max_seconds=2)) == 1_600


def test_not_a_number_is_silence() -> None:
    samples = tone(0.1, 16_000)
    samples[5] = np.nan
    assert np.isfinite(audio.decode(encoded(samples, 16_000, "WAV", "FLOAT"), max_seconds=2)).all()
