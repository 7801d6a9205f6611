"""Facts and a conversation to what the language model is given: pure. Called by the stage `prompt`.

The wording is fitted to a model of 135 M parameters; `tests/voice/reliability.py` measures what it is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

from stage_models.voice.conversation import Fact, Turn

INSTRUCTION = "You are a helpful assistant. Answer in one short sentence."
GROUNDED = f"{INSTRUCTION} Repeat the fact that answers the question."


def build(turns: Sequence[Turn], facts: Sequence[Fact], *, max_turns: int) -> list[Turn]:
    """Chat messages: one instruction, then the last ``max_turns`` turns, the facts beside the last question.

    A system message of the client's own takes the instruction's place.
    """
    instructions = [turn.text for turn in turns if turn.role in ("system", "developer")]
    spoken = [turn for turn in turns if turn.role not in ("system", "developer")][-max_turns:]
    instruction = "\n".join(instructions) if instructions else (GROUNDED if facts else INSTRUCTION)
    return [Turn(role="system", text=instruction), *spoken[:-1], _grounded(spoken[-1], facts)]


def _grounded(question: Turn, facts: Sequence[Fact]) -> Turn:
    # Best fact last, right before the question: a small model quotes what it read last.
    if not facts:
        return question
    listed = "\n".join(fact.text for fact in reversed(facts))
    return Turn(role=question.role, text=f"{listed}\n\n{question.text}")
