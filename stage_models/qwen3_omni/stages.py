"""The factories of ``examples/qwen3_omni/pipeline.yaml``: parts of a checkpoint loaded, wrapped as stages.

Each factory is called once per process. The checkpoint is the pipeline's ``modelPath``, else the factory's ``model``;
without both, the tiny one that is made in code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

import stage_runtime as omni
from stage_models.qwen3_omni import checkpoint, pieces, routing, values
from stage_models.qwen3_omni.batching import Batches
from stage_models.qwen3_omni.encoding import AudioEncoder, ImageEncoder
from stage_models.qwen3_omni.preparing import Preparer
from stage_models.qwen3_omni.speaking import Speaking
from stage_models.qwen3_omni.thinking import Thinking
from stage_models.qwen3_omni.vocoder import Vocoder
from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import span

SAMPLE_RATE: Final = 24_000
SILENCE: Final = SAMPLE_RATE // 5  #: Samples of an answer without frames.
CACHE_MIB: Final = 256
MOST_FRAMES: Final = 4096  # of one piece
#: The defaults of its class in transformers, where the checkpoint's generation config says nothing.
THINKER_PARAMS: Final[dict[str, Any]] = {"max_tokens": 1024}
#: The same for the talker. The talker is greedy where the request is.
TALKER_PARAMS: Final[dict[str, Any]] = {"max_tokens": 4096, "temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05}


def preprocess(
    context: omni.StageContext, *, model: str | None = None, voice: str | None = None, threads: int = 1
) -> omni.Simple:
    """Messages, pictures and sounds to the thinker's prompt. voice: of requests that name none."""
    torch.set_num_threads(threads)
    folder, revision = _checkpoint(context, model)
    preparer = Preparer(folder, checkpoint.config_of(folder, revision), voice=voice, revision=revision)

    def run(payload: omni.StagePayload) -> routing.Parts:
        with span("preprocess", payload.request.id):
            return preparer.prepare(payload.request)

    return omni.Simple(run)


def image_encoder(
    context: omni.StageContext,
    *,
    model: str | None = None,
    dtype: str = "float32",
    max_batch: int = 8,
    cache_mib: int = CACHE_MIB,
    threads: int = 1,
) -> omni.Batched:
    """Patches to rows of the thinker. cache_mib: of rows kept for pictures that come again; 0 keeps none."""
    part = _encoder_part(context, "image_encoder", model, dtype, threads)
    return _batched("image", ImageEncoder(part, cache_bytes=cache_mib << 20), max_batch)


def audio_encoder(
    context: omni.StageContext,
    *,
    model: str | None = None,
    dtype: str = "float32",
    max_batch: int = 8,
    cache_mib: int = CACHE_MIB,
    threads: int = 1,
) -> omni.Batched:
    """Mel frames to rows of the thinker. cache_mib: as of `image_encoder`."""
    part = _encoder_part(context, "audio_encoder", model, dtype, threads)
    return _batched("audio", AudioEncoder(part, cache_bytes=cache_mib << 20), max_batch)


def _encoder_part(context: omni.StageContext, name: str, model: str | None, dtype: str, threads: int) -> Any:
    torch.set_num_threads(threads)
    folder, revision = _checkpoint(context, model)
    return checkpoint.load(
        folder, name, dtype=_float_of(dtype, context.device), device=context.device, revision=revision
    )


def _batched(modality: str, encoder: ImageEncoder | AudioEncoder, max_batch: int) -> omni.Batched:
    encode: Any = encoder.encode

    def run(payloads: list[omni.StagePayload]) -> list[Any]:
        with span("encoder", payloads[0].request.id, modality=modality, batch_size=len(payloads)):
            return list(encode([payload.data for payload in payloads]))

    return omni.Batched(run, max_batch=max_batch, gauges=encoder.cache.gauges)


def thinker(
    context: omni.StageContext, *, model: str | None = None, params: Mapping[str, Any] = {}, **engine: Any
) -> omni.Autoregressive:
    """The language model, which sees and hears. params: defaults of sampling. engine: of `omni.Autoregressive`."""
    folder, revision = _checkpoint(context, model)
    thinking = Thinking(checkpoint.config_of(folder, revision))
    return omni.Autoregressive(
        model=folder,
        revision=revision,
        decoder="stage_models.qwen3_omni.decoders:Thinker",
        prompt=thinking.prompt,
        deliver=thinking.deliver,
        keep_rows=thinking.keep_rows,
        params={**THINKER_PARAMS, **checkpoint.generation_of(folder, "thinker", revision), **params},
        **engine,
    )


def talker(
    context: omni.StageContext, *, model: str | None = None, params: Mapping[str, Any] = {}, **engine: Any
) -> omni.Autoregressive:
    """Frames of codes, while the thinker still writes. params: defaults of sampling. engine: as of `thinker`."""
    folder, revision = _checkpoint(context, model)
    speaking = Speaking(folder, dtype=_float_of(engine.get("dtype"), "cpu"), revision=revision)
    return omni.Autoregressive(
        model=folder,
        revision=revision,
        decoder="stage_models.qwen3_omni.decoders:Talker",
        prompt=_speech_of,
        deliver=_frames,
        stream=speaking.stream,
        params={**TALKER_PARAMS, **checkpoint.generation_of(folder, "talker", revision), **params},
        **engine,
    )


def _speech_of(payload: omni.StagePayload) -> omni.Prompt:
    """The talker's own parameters: of the request's, it takes the seed, and whether it is greedy."""
    given = payload.request.params
    params = {"seed": given["seed"]} if given.get("seed") is not None else {}
    if given.get("temperature") == 0:
        params["temperature"] = 0
    return omni.Prompt(parts=(), params=params)


def _frames(payload: omni.StagePayload, generation: omni.Generation) -> Any:
    if generation.emitted is not None:
        yield omni.Chunk(values.Frames(codes=generation.emitted), to="code2wav")
    if generation.finish is not None:
        yield omni.Result(omni.Usage(completion_tokens=generation.completion_tokens))


def decode() -> omni.Streaming:
    """The thinker's text for the client, with the usage of the whole request."""

    async def run(session: omni.Session) -> AsyncIterator[omni.Chunk | omni.Result]:
        async for chunk in session.chunks():
            yield omni.Chunk(chunk.data)
        thought: values.Thought = (await session.payload()).data
        yield omni.Result([thought.usage, omni.Finish(thought.finish)])

    return omni.Streaming(run)


def code2wav(
    context: omni.StageContext,
    *,
    model: str | None = None,
    dtype: str = "float32",
    initial_codec_chunk_frames: int | None = None,
    codec_chunk_frames: int = 25,
    max_batch: int = 16,
    threads: int = 1,
) -> omni.Streaming:
    """Frames to sound, piece by piece.

    initial_codec_chunk_frames: of the first piece, so that sound begins early; None: 4, and 12 or 28 where many
    requests are spoken at once (`pieces.opening`). Each further piece has twice as many, up to codec_chunk_frames, so
    that a player does not run dry while the second one is made. A request may name both. max_batch: requests in one
    pass.
    """
    torch.set_num_threads(threads)
    folder, revision = _checkpoint(context, model)
    part = checkpoint.load(
        folder, "code2wav", dtype=_float_of(dtype, context.device), device=context.device, revision=revision
    )
    vocoder = Vocoder(part)
    batches = Batches(vocoder, max_batch)
    speaking: set[int] = set()  #: Requests under way.

    async def run(session: omni.Session) -> AsyncIterator[omni.Chunk | omni.Result]:
        initial = _frames_of(session.request, "initial_codec_chunk_frames", initial_codec_chunk_frames)
        steady = _frames_of(session.request, "codec_chunk_frames", codec_chunk_frames) or codec_chunk_frames
        speaking.add(id(session))
        try:
            merged = pieces.opening(len(speaking)) if initial is None else 1
            plan = pieces.Pieces(pieces.INITIAL if initial is None else initial, steady, merged)
            state, waiting = vocoder.begin(), torch.empty(0, vocoder.groups, dtype=torch.long)
            async for chunk in session.chunks():
                waiting = torch.cat([waiting, _checked(chunk.data, vocoder)])
                while (taken := plan.take(len(waiting))) is not None:
                    now, waiting = waiting[: sum(taken)], waiting[sum(taken) :]
                    yield _sound([await batches.decode(state, one) for one in torch.split(now, taken)])
            if len(waiting):
                taken = plan.rest(len(waiting))
                yield _sound([await batches.decode(state, one) for one in torch.split(waiting, taken)])
            if not state.frames:  # the talker has nothing to say: who asked for sound gets some
                yield _sound([torch.zeros(SILENCE)])
            usage = omni.Usage(completion_tokens=state.frames, completion_audio_tokens=state.frames)
            yield omni.Result([omni.Note("frames", state.frames), usage])
        finally:
            speaking.discard(id(session))

    return omni.Streaming(run)


def _sound(samples: Sequence[Tensor]) -> omni.Chunk:
    return omni.Chunk(omni.Audio(torch.cat(list(samples)), SAMPLE_RATE), modality="audio")


def _checked(data: Any, vocoder: Vocoder) -> Tensor:
    codes = data.codes if isinstance(data, values.Frames) else None
    if not isinstance(codes, Tensor) or codes.ndim != 2 or codes.shape[1] != vocoder.groups:
        raise ValueError(f"code2wav: expected frames of {vocoder.groups} codes, got {type(data).__name__}")
    if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < vocoder.codebook:
        raise ValueError(f"code2wav: codes must be from 0 to {vocoder.codebook - 1}")
    return codes.long()


def _frames_of(request: omni.OmniRequest, name: str, default: int | None) -> int | None:
    value = request.params.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= MOST_FRAMES:
        raise omni.InvalidRequest(f"{name} must be a whole number from 1 to {MOST_FRAMES}, not {value!r}", param=name)
    return value


def _checkpoint(context: omni.StageContext, model: str | None) -> tuple[str, str | None]:
    path = context.model_path
    return checkpoint.folder_of(path or model), context.model_revision if path else None


def _float_of(dtype: Any, device: str) -> str:
    """torch's name of a dtype. Raises: ConfigurationError: it is not one that models are computed in."""
    from stage_runtime.engines.autoregressive.model import dtypes

    if dtype is None:
        return "float32"
    if dtype not in dtypes.DTYPES:
        raise ConfigurationError(f"dtype={dtype!r}: expected one of {', '.join(dtypes.DTYPES)}")
    return dtypes.chosen("auto", device) if dtype == "auto" else str(dtype)
