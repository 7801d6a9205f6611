"""The configuration of a session: GA's and the beta's fields read into one value, merged, and shown in either form.
Pure.

A field that an update does not name keeps its value.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.realtime import dialects, formats
from stage_runtime.web.realtime.speech import turns

Modality = Literal["text", "audio"]
MaxTokens = Annotated[int, Meta(ge=1)] | Literal["inf"]
Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]
ShortText = Annotated[str, Meta(max_length=1 << 18)]
MAX_NBYTES: Final = 1 << 20  # of a session's configuration as JSON: tools and instructions are most of it
Tools = Annotated[list[dict[str, Any]], Meta(max_length=128)]

#: Silence after which ``semantic_vad`` ends a turn here, by its eagerness.
EAGERNESS_MS: Final = {"low": 1000, "medium": 700, "auto": 700, "high": 400}


class TurnDetection(msgspec.Struct, frozen=True, kw_only=True):
    """How turns are found. ``semantic_vad`` is the same detector with a silence by its eagerness."""

    type: Literal["server_vad", "semantic_vad"] = "server_vad"
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: Milliseconds | None = None
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"

    def rule(self) -> turns.Rule:
        semantic = self.type == "semantic_vad"
        silence_ms = EAGERNESS_MS[self.eagerness] if semantic else self.silence_duration_ms
        return turns.Rule(threshold=self.threshold, silence_ms=silence_ms)

    def shown(self) -> dict[str, Any]:
        kept = ("type", "create_response", "interrupt_response")
        if self.type == "semantic_vad":
            return {name: getattr(self, name) for name in (*kept, "eagerness")}
        more = ("threshold", "prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms")
        return {name: getattr(self, name) for name in (*kept, *more)}


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a session is told."""

    type: Literal["realtime", "transcription"] = "realtime"
    modalities: tuple[Modality, ...] = ("audio",)
    instructions: str = ""
    voice: str | None = None
    speed: float = 1.0
    input_format: str = "audio/pcm"
    output_format: str = "audio/pcm"
    turn_detection: TurnDetection | None = None
    transcription: dict[str, Any] | None = None
    noise_reduction: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    temperature: float | None = None
    max_output_tokens: int | Literal["inf"] = "inf"
    truncation: str | dict[str, Any] = "auto"
    include: list[str] | None = None
    tracing: Any = None


class _VoiceId(msgspec.Struct, frozen=True):
    id: str


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate: Literal[24000, 8000] | None = None


_BetaFormat = Literal["pcm16", "g711_ulaw", "g711_alaw"]
_Patched = dict[str, Any] | None | UnsetType


class _AudioInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: _Format | UnsetType | None = UNSET
    turn_detection: _Patched = UNSET
    transcription: _Patched = UNSET
    noise_reduction: _Patched = UNSET


class _AudioOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: _Format | UnsetType | None = UNSET
    voice: str | _VoiceId | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=4)] | UnsetType | None = UNSET


class _Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: _AudioInput | None = None
    output: _AudioOutput | None = None


class SpokenPatch(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that an update of the session and a response may both name."""

    audio: _Audio | None = None
    output_modalities: list[Modality] | None = None
    instructions: ShortText | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt: None = None
    reasoning: dict[str, Any] | None = None
    # the beta's
    modalities: list[Modality] | None = None
    voice: str | _VoiceId | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    output_audio_format: _BetaFormat | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    max_response_output_tokens: MaxTokens | None = None


class SessionPatch(SpokenPatch, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``session`` of an update."""

    type: Literal["realtime", "transcription"] | None = None
    truncation: str | dict[str, Any] | None = None
    include: list[str] | UnsetType | None = UNSET
    tracing: Any = UNSET
    # what a client sends back of the session that it was shown
    id: str | None = None
    object: str | None = None
    model: str | None = None
    expires_at: int | None = None
    client_secret: Any = None
    # the beta's
    input_audio_format: _BetaFormat | None = None
    input_audio_transcription: _Patched = UNSET
    input_audio_noise_reduction: _Patched = UNSET
    turn_detection: _Patched = UNSET


class ResponsePatch(SpokenPatch, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``response`` of a ``response.create``."""

    conversation: Literal["auto", "none"] | None = None
    metadata: dict[str, str] | None = None
    input: list[dict[str, Any]] | None = None


def updated(config: SessionConfig, given: SessionPatch, *, detects: bool) -> SessionConfig:
    """The configuration after an update.

    detects: turns can be detected here.
    Raises: InvalidRequest: a field cannot be had; nothing is changed.
    """
    heard = (given.audio.input if given.audio else None) or _AudioInput()
    fields: dict[str, Any] = {}
    detection = _first(heard.turn_detection, given.turn_detection)
    if detection is not UNSET:
        fields["turn_detection"] = _detection(config.turn_detection, detection, detects=detects)
    if heard.format not in (UNSET, None):
        fields["input_format"] = _format(heard.format, "session.audio.input.format")
    elif given.input_audio_format is not None:
        fields["input_format"] = _ga_name(given.input_audio_format)
    for name, ga, beta in (
        ("transcription", heard.transcription, given.input_audio_transcription),
        ("noise_reduction", heard.noise_reduction, given.input_audio_noise_reduction),
        ("include", given.include, UNSET),
        ("tracing", given.tracing, UNSET),
    ):
        if (value := _first(ga, beta)) is not UNSET:
            fields[name] = value
    _check_hints(fields.get("transcription") or {})
    for name in ("type", "truncation"):
        if (value := getattr(given, name)) is not None:
            fields[name] = value
    return msgspec.structs.replace(spoken(config, given, "session"), **fields)


def spoken(config: SessionConfig, given: SpokenPatch, where: str) -> SessionConfig:
    """The configuration with what ``given`` says of answers. Raises: InvalidRequest."""
    said = (given.audio.output if given.audio else None) or _AudioOutput()
    fields: dict[str, Any] = {}
    if said.format not in (UNSET, None):
        fields["output_format"] = _format(said.format, f"{where}.audio.output.format")
    elif given.output_audio_format is not None:
        fields["output_format"] = _ga_name(given.output_audio_format)
    if (voice := _first(said.voice, given.voice)) is not UNSET:
        fields["voice"] = voice.id if isinstance(voice, _VoiceId) else voice
    speed = given.speed if said.speed in (UNSET, None) else said.speed
    modalities = given.output_modalities or given.modalities
    if modalities is not None:
        fields["modalities"] = ("audio",) if "audio" in modalities else ("text",)
    for name, value in (
        ("speed", speed),
        ("instructions", given.instructions),
        ("tools", given.tools),
        ("tool_choice", given.tool_choice),
        ("max_output_tokens", given.max_output_tokens or given.max_response_output_tokens),
    ):
        if value is not None:
            fields[name] = value
    if given.temperature is not UNSET:
        fields["temperature"] = given.temperature
    for index, tool in enumerate(given.tools or ()):
        _check_tool(tool, f"{where}.tools[{index}]")
    return msgspec.structs.replace(config, **fields)


def shown(config: SessionConfig, *, session_id: str, model: str, beta: bool) -> dict[str, Any]:
    """The session as ``session.created`` and ``session.updated`` show it."""
    detection = None if config.turn_detection is None else config.turn_detection.shown()
    if beta and config.type == "transcription":
        return {
            "id": session_id,
            "object": dialects.TRANSCRIPTION,
            "modalities": _beta_modalities(config),
            "input_audio_format": formats.FORMATS[config.input_format].beta,
            "input_audio_transcription": config.transcription,
            "input_audio_noise_reduction": config.noise_reduction,
            "turn_detection": detection,
            "include": config.include,
        }
    if beta:
        return {
            "id": session_id,
            "object": "realtime.session",
            "model": model,
            "modalities": _beta_modalities(config),
            "instructions": config.instructions,
            "voice": config.voice,
            "input_audio_format": formats.FORMATS[config.input_format].beta,
            "output_audio_format": formats.FORMATS[config.output_format].beta,
            "input_audio_transcription": config.transcription,
            "input_audio_noise_reduction": config.noise_reduction,
            "turn_detection": detection,
            "tools": config.tools,
            "tool_choice": config.tool_choice,
            "temperature": config.temperature,
            "max_response_output_tokens": config.max_output_tokens,
            "speed": config.speed,
            "tracing": config.tracing,
        }
    heard = {
        "format": format_shown(config.input_format),
        "transcription": config.transcription,
        "noise_reduction": config.noise_reduction,
        "turn_detection": detection,
    }
    head = {"type": config.type, "object": _OBJECTS[config.type], "id": session_id}
    if config.type == "transcription":
        return {**head, "audio": {"input": heard}, "include": config.include}
    said = {"format": format_shown(config.output_format), "voice": config.voice, "speed": config.speed}
    return {
        **head,
        "model": model,
        "output_modalities": list(config.modalities),
        "instructions": config.instructions,
        "audio": {"input": heard, "output": said},
        "tools": config.tools,
        "tool_choice": config.tool_choice,
        "max_output_tokens": config.max_output_tokens,
        "truncation": config.truncation,
        "include": config.include,
        "tracing": config.tracing,
        "prompt": None,
    }


_OBJECTS: Final = {"realtime": "realtime.session", "transcription": dialects.TRANSCRIPTION}


def format_shown(name: str) -> dict[str, Any]:
    return {"type": name, "rate": formats.PCM.rate} if name == formats.PCM.name else {"type": name}


def answer_shown(config: SessionConfig, *, beta: bool) -> dict[str, Any]:
    """The fields that a response shows of itself."""
    if beta:
        return {
            "modalities": _beta_modalities(config),
            "voice": config.voice,
            "output_audio_format": formats.FORMATS[config.output_format].beta,
            "temperature": config.temperature,
            "max_output_tokens": config.max_output_tokens,
        }
    return {
        "output_modalities": list(config.modalities),
        "audio": {"output": {"format": format_shown(config.output_format), "voice": config.voice}},
        "max_output_tokens": config.max_output_tokens,
    }


def _beta_modalities(config: SessionConfig) -> list[str]:
    return ["text", "audio"] if "audio" in config.modalities else ["text"]


def _first(ga: Any, beta: Any) -> Any:
    return beta if ga is UNSET else ga


def _ga_name(beta: str) -> str:
    return next(one.name for one in formats.FORMATS.values() if one.beta == beta)


def _format(given: Any, where: str) -> str:
    rate = formats.FORMATS[given.type].rate
    if given.rate not in (None, rate):
        raise InvalidRequest(f"{where}.rate: expected {rate} of {given.type}, got {given.rate}", param=f"{where}.rate")
    return str(given.type)


def _detection(known: TurnDetection | None, given: dict[str, Any] | None, *, detects: bool) -> TurnDetection | None:
    where = "session.audio.input.turn_detection"
    if given is None or given.get("type") == "none":
        return None
    if not detects:
        problem = "expected null: this server has no voice detector (pip install 'omnipipeline[voice]')"
        raise InvalidRequest(f"{where}: {problem}", param=where)
    names = TurnDetection.__struct_fields__
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise InvalidRequest(f"{where}.{unknown}: unknown parameter", param=f"{where}.{unknown}")
    base = known or TurnDetection()
    fields = {name: getattr(base, name) for name in names}
    fields |= {name: value for name, value in given.items() if value is not None or name == "idle_timeout_ms"}
    try:
        return msgspec.convert(fields, TurnDetection)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None


def _check_hints(transcription: dict[str, Any]) -> None:
    """Check what stages are given of it."""
    for name in ("language", "prompt"):
        value = transcription.get(name)
        if value is not None and not isinstance(value, str):
            where = f"session.audio.input.transcription.{name}"
            raise InvalidRequest(f"{where}: expected a text, got {type(value).__name__}", param=where)


def _check_tool(tool: dict[str, Any], where: str) -> None:
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type: expected 'function', got {tool['type']!r}", param=f"{where}.type")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name: expected the function's name", param=f"{where}.name")
