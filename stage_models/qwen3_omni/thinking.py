"""The thinker's prompt from tokens and encoders' rows, and its answer for `decode` and the talker. No model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import torch

import stage_runtime as omni
from stage_models.qwen3_omni import values
from stage_models.qwen3_omni.positions import positions

#: Names of `omni.Autoregressive.keep_rows`: what the talker needs of the thinker.
INPUT: Final = "input"
ACCEPTED: Final = "accepted"


class Thinking:
    """The thinker of one checkpoint. Called by its stage."""

    def __init__(self, config: Any) -> None:
        thinker, talker = config.thinker_config, config.talker_config
        self._image = int(thinker.image_token_id)
        self._audio = int(thinker.audio_token_id)
        self._merge = int(thinker.vision_config.spatial_merge_size)
        #: Rows that the talker is made of; see `omni.Autoregressive`.
        self.keep_rows: dict[str, tuple[int, Literal["prompt", "answer", "all"]]] = {
            INPUT: (0, "all"),
            ACCEPTED: (int(talker.accept_hidden_layer), "prompt"),
        }

    def prompt(self, payload: omni.StagePayload) -> omni.Prompt:
        if payload.request.params.get("n") not in (None, 1):
            raise omni.InvalidRequest("n: one answer to a request is supported", param="n")
        given: values.Understood = payload.data
        tokens, prepared = given.prepared.tokens, given.prepared
        where, delta = positions(tokens, self._image, prepared.grids, self._merge)
        seen, heard = given.seen, given.heard
        return omni.Prompt(
            parts=self._parts(tokens, None if seen is None else seen.rows, None if heard is None else heard.rows),
            positions=torch.from_numpy(where),
            position_delta=delta,
            added_rows=[] if seen is None else self._added(tokens, seen.deepstack),
            params={name: value for name, value in payload.request.params.items() if name not in OF_SPEECH},
        )

    def _parts(self, tokens: list[int], images: Any, sounds: Any) -> list[Any]:
        """Runs of token ids, and in place of media their rows."""
        left = {self._image: images, self._audio: sounds}
        taken = {self._image: 0, self._audio: 0}
        parts: list[Any] = []
        ids = np.asarray(tokens)
        borders = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(tokens)]
        for start, end in itertools.pairwise(borders):
            token = tokens[start] if start < len(tokens) else -1
            if token not in left:
                parts.append(tokens[start:end])
                continue
            rows, at = left[token], taken[token]
            if rows is None or at + end - start > len(rows):
                raise ValueError("the prompt has places for more rows than its encoders gave")
            parts.append(rows[at : at + end - start])
            taken[token] = at + end - start
        return parts

    def _added(self, tokens: list[int], layers: list[Any]) -> list[tuple[int, list[int], Any]]:
        places = [at for at, token in enumerate(tokens) if token == self._image]
        return [(layer, places, rows) for layer, rows in enumerate(layers)]

    def deliver(self, payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        """Text to `decode`; rows to the talker, where the answer is spoken. The last token's row is not used by it."""
        prepared: values.Prepared = payload.data.prepared
        if generation.text:
            yield omni.Chunk(omni.Text(generation.text), to="decode")
        if prepared.voice is not None and generation.tokens:
            rows = generation.rows[INPUT]
            rows = rows[:-1] if generation.finish is not None else rows
            begins = bool(generation.prompt_rows)
            if begins:
                yield omni.Chunk(self._opening(prepared, generation.prompt_rows), to="talker")
            if begins or len(rows):
                yield omni.Chunk(values.Written(rows=rows, begins=begins), to="talker")
        if generation.finish is not None:
            yield omni.Result(
                values.Thought(
                    usage=omni.Usage(
                        generation.prompt_tokens,
                        generation.completion_tokens,
                        generation.cached_tokens,
                        prompt_image_tokens=prepared.image_tokens,
                        prompt_audio_tokens=prepared.audio_tokens,
                    ),
                    finish=generation.finish,
                    spoken=prepared.voice is not None,
                )
            )

    def _opening(self, prepared: values.Prepared, rows: Mapping[str, Any]) -> values.Opening:
        media = torch.tensor([token in (self._image, self._audio) for token in prepared.tokens])
        return values.Opening(
            tokens=prepared.tokens,
            embeddings=rows[INPUT],
            hidden=rows[ACCEPTED][media],
            grids=prepared.grids,
            voice=prepared.voice or "",
        )


#: Parameters of requests that are not the thinker's.
OF_SPEECH: Final = frozenset({"voice", "initial_codec_chunk_frames", "codec_chunk_frames"})
