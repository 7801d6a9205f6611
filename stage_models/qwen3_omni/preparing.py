"""A client's request to the thinker's prompt: messages to tokens, pictures to patches, sounds to mel frames. No model.

Everything refused here is the client's fault, and says which part of the request is meant. Called by the stage
`preprocess`.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jinja2
import numpy as np
import numpy.typing as npt

import stage_runtime as omni
from stage_models.qwen3_omni import values
from stage_models.voice import audio, requests
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.errors import ConfigurationError, ContextLengthExceeded

SAMPLE_RATE: Final = 16_000
MAX_SECONDS: Final = 300.0  # of one sound
MAX_PIXELS: Final = 64_000_000  # of one picture before it is made smaller: what a camera takes
MAX_RATIO: Final = 200  # of a picture's sides, by its resizing
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others run programs (EPS) or are rare and badly guarded
EXPECTED: Final = "inputs must be a text, or hold text, image, audio or messages"
SHORTEST: Final = 400  # samples of one mel frame; a shorter sound is padded with silence


class Preparer:
    """The tokenizer and the feature extractors of one checkpoint. Any thread may use it, one at a time."""

    def __init__(self, model: str, config: Any, *, voice: str | None = None, revision: str | None = None) -> None:
        """voice: of requests that name none; by default the checkpoint's first.

        Raises: ConfigurationError: the checkpoint does not have this voice.
        """
        from transformers import AutoTokenizer, WhisperFeatureExtractor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        named: dict[str, Any] = {} if revision is None else {"revision": revision}
        self._encoder = TextEncoder(AutoTokenizer.from_pretrained(model, **named))
        self._mel: Any = WhisperFeatureExtractor.from_pretrained(model, **named)
        self._patches: Any = Qwen2VLImageProcessorPil.from_pretrained(model, **named)
        self._voices = sorted(config.talker_config.speaker_id)
        self._voice = voice or self._voices[0]
        if self._voice.lower() not in self._voices:
            raise ConfigurationError(f"unknown voice {voice!r}; {model} has {', '.join(self._voices)}")
        self._window = int(config.thinker_config.audio_config.n_window)
        self._image = int(config.thinker_config.image_token_id)
        self._audio = int(config.thinker_config.audio_token_id)
        self._longest = int(config.thinker_config.text_config.max_position_embeddings)

    def prepare(
        self, request: omni.OmniRequest
    ) -> tuple[values.Prepared, values.Pictures | None, values.Sounds | None]:
        """Raises: InvalidRequest: a part cannot be read, or is of a kind that this model does not take."""
        media = _Media(self._longest)
        messages = [
            {**item, "content": [self._part(part, where, media) for where, part in _parts(item, index)]}
            for index, item in enumerate(_messages(request))
        ]
        prepared = values.Prepared(
            tokens=self._expanded(self._tokens(messages), media.grids, media.heard),
            grids=media.grids,
            audio=media.heard,
            voice=self._voice_of(request),
        )
        return prepared, media.pictures(), media.sounds()

    def _tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            return self._encoder.chat(messages, {"add_generation_prompt": True})
        except (TypeError, ValueError, KeyError, AttributeError, jinja2.TemplateError) as error:
            raise omni.InvalidRequest(
                f"the messages do not fit the model's chat template: {error}", param="messages"
            ) from error

    def _expanded(self, tokens: list[int], grids: list[list[int]], heard: list[int]) -> list[int]:
        """Each medium's one token as many times as it has rows."""
        counts = {self._image: [values.rows_of(grid) for grid in grids], self._audio: list(heard)}
        for token, left in counts.items():
            if tokens.count(token) != len(left):
                raise omni.InvalidRequest(
                    "the chat template gives no place to a part of the messages", param="messages"
                )
        expanded: list[int] = []
        for token in tokens:
            expanded += [token] * (counts[token].pop(0) if token in counts else 1)
        return expanded

    def _voice_of(self, request: omni.OmniRequest) -> str | None:
        if "audio" not in request.modalities and (request.kind != "pipeline" or request.modalities):
            return None
        voice = request.params.get("voice") or self._voice
        if not isinstance(voice, str) or voice.lower() not in self._voices:
            raise omni.InvalidRequest(
                f"unknown voice {voice!r}; the model has {', '.join(self._voices)}", param="audio.voice"
            )
        return voice.lower()

    # --- parts of messages ----------------------------------------------------------------------------------------

    def _part(self, part: Mapping[str, Any], where: str, media: _Media) -> dict[str, Any]:
        match part.get("type"):
            case "text":
                return {"type": "text", "text": str(part.get("text", ""))}
            case "image":
                media.add_picture(*self._picture(part.get("data"), where))
                return {"type": "image"}
            case "audio":
                mel = self._sound(part.get("data"), where)
                media.add_sound(mel, self._audio_rows(mel.shape[1]))
                return {"type": "audio"}
            case "video":
                raise omni.InvalidRequest(f"{where}: video is not supported; send frames as images", param="messages")
            case other:
                raise omni.InvalidRequest(f"{where}: a part of type {other!r} is not supported", param="messages")

    def _picture(self, data: Any, where: str) -> tuple[Any, list[int]]:
        """Patches f32 ``[t * h * w, values]``, and ``[t, h, w]``."""
        import torch

        image = _opened(_bytes(data, where), where)
        found = self._patches(images=[image], return_tensors="np")
        pixels = torch.from_numpy(np.ascontiguousarray(found["pixel_values"], dtype=np.float32))
        return pixels, [int(one) for one in found["image_grid_thw"][0]]

    def _sound(self, data: Any, where: str) -> Any:
        """Mel frames f32 ``[mel, frames]``."""
        import torch

        try:
            samples = audio.decode(_bytes(data, where), max_seconds=MAX_SECONDS)
        except omni.InvalidRequest as error:
            raise omni.InvalidRequest(f"{where}: {error}", param="messages") from error
        if samples.size < SHORTEST:
            samples = np.pad(samples, (0, SHORTEST - samples.size))
        found = self._mel(
            samples,
            sampling_rate=SAMPLE_RATE,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        frames = int(found["attention_mask"][0].sum())
        return torch.from_numpy(np.ascontiguousarray(found["input_features"][0][:, :frames], dtype=np.float32))

    def _audio_rows(self, frames: int) -> int:
        """Rows that the audio encoder gives for so many mel frames."""
        from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

        return int(_get_feat_extract_output_lengths(frames, self._window))


class _Media:
    """The pictures and sounds of one request, as they are read. They never take more rows than the thinker does, so a
    request of many small files, each of which is large when it is read, is not read to its end.
    """

    def __init__(self, longest: int) -> None:
        """longest: tokens of the thinker's prompt and answer."""
        self.grids: list[list[int]] = []
        self.heard: list[int] = []  #: Rows of each sound.
        self._patches: list[Any] = []
        self._mels: list[Any] = []
        self._longest = longest
        self._rows = 0  #: Rows of all pictures and sounds.

    def add_picture(self, patches: Any, grid: list[int]) -> None:
        """Raises: ContextLengthExceeded."""
        self._count(values.rows_of(grid))
        self.grids.append(grid)
        self._patches.append(patches)

    def add_sound(self, mel: Any, rows: int) -> None:
        """Raises: ContextLengthExceeded."""
        self._count(rows)
        self.heard.append(rows)
        self._mels.append(mel)

    def pictures(self) -> values.Pictures | None:
        if not self.grids:
            return None
        keys = [_key(one, grid) for one, grid in zip(self._patches, self.grids, strict=True)]
        return values.Pictures(pixels=self._patches, grids=self.grids, keys=keys)

    def sounds(self) -> values.Sounds | None:
        return values.Sounds(features=self._mels, keys=[_key(one) for one in self._mels]) if self._mels else None

    def _count(self, rows: int) -> None:
        self._rows += rows
        if self._rows >= self._longest:
            raise ContextLengthExceeded(self._rows, self._longest)


def _messages(request: omni.OmniRequest) -> list[dict[str, Any]]:
    """Chat messages, also of a pipeline request: a string, ``{text, image, audio}`` or ``{messages}``."""
    if request.kind == "speech":
        raise omni.InvalidRequest(
            "this model speaks its own answers; it does not read a given text aloud: use /v1/chat/completions",
            param="input",
        )
    inputs = {"text": request.inputs} if isinstance(request.inputs, str) else request.inputs
    if not isinstance(inputs, Mapping):
        raise omni.InvalidRequest(EXPECTED, param="inputs")
    if "messages" in inputs:
        requests.check_messages(inputs["messages"])
        return request.messages()
    parts: list[dict[str, Any]] = [
        {"type": kind, "data": inputs[kind]} for kind in ("image", "audio") if inputs.get(kind) is not None
    ]
    if inputs.get("text"):
        parts.append({"type": "text", "text": requests.checked_text(inputs["text"], "inputs.text", "inputs")})
    if not parts:
        raise omni.InvalidRequest(EXPECTED, param="inputs")
    return [{"role": "user", "content": parts}]


def _parts(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for at, part in enumerate(item["content"]):
        yield f"messages[{index}].content[{at}]", part


def _bytes(data: Any, where: str) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview) or not data:
        raise omni.InvalidRequest(f"{where}: expected the bytes of a file", param="messages")
    return bytes(data)


def _opened(data: bytes, where: str) -> Any:
    """A picture, right way up, in RGB. Raises: InvalidRequest: it is not one, is damaged or too large."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    known = ", ".join(FORMATS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
            wide, high = image.size
            _check_size(wide, high, where)
            return ImageOps.exif_transpose(image).convert("RGB")
    except omni.InvalidRequest:
        raise
    except UnidentifiedImageError as error:  # its text names the Python object that was read
        raise omni.InvalidRequest(f"{where}: expected a picture ({known})", param="messages") from error
    except Exception as error:  # its readers raise whatever a damaged file leads them to
        raise omni.InvalidRequest(f"{where}: expected a picture ({known}): {error}", param="messages") from error


def _check_size(wide: int, high: int, where: str) -> None:
    if wide * high > MAX_PIXELS:
        problem = f"at most {MAX_PIXELS} pixels are taken"
    elif max(wide, high) > MAX_RATIO * min(wide, high):
        problem = f"one side may be {MAX_RATIO} times the other"
    else:
        return
    raise omni.InvalidRequest(f"{where}: the picture has {wide} x {high} pixels; {problem}", param="messages")


def _key(tensor: Any, grid: Sequence[int] = ()) -> str:
    """grid: of a picture. Patches alone do not say it: a wide picture of one colour has those of a high one."""
    array: npt.NDArray[np.float32] = tensor.numpy()
    return hashlib.blake2b(array.tobytes() + repr((array.shape, *grid)).encode(), digest_size=16).hexdigest()
