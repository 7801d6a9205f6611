"""The values that the voice stages exchange. Plain values: no models, no I/O. Every other module here uses it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

import stage_runtime as omni

#: The wish of a client who speaks: an answer, the spoken words as text, or these in English. (A text to read aloud is a
#: `Script`.)
Task = Literal["answer", "transcribe", "translate"]


@omni.message
class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation, as text."""

    role: str
    text: str


@omni.message
class Utterance(msgspec.Struct, frozen=True, kw_only=True):
    """Speech that belongs to a turn.

    turn: index into the conversation's turns. samples: f32 ``[n]``, mono, `audio.SAMPLE_RATE`; silence cut off.
    """

    turn: int
    samples: Any


@omni.message
class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation with speech that is still to be recognised: what `listen` gives for sound.

    aloud: whether the answer is to be spoken too. language: of the speech, as the client says.
    """

    task: Task
    aloud: bool
    turns: list[Turn]
    utterances: list[Utterance]
    hint: str | None = None
    language: str | None = None


@omni.message
class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in words, its last turn to be answered: from `recognise`, or from `listen` when it was typed.

    transcript: what was understood of the last turn's speech; None when it was typed.
    """

    task: Task
    aloud: bool
    turns: list[Turn]
    transcript: str | None = None

    @property
    def text(self) -> str:
        return self.turns[-1].text


@omni.message
class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the facts file. score: cosine similarity to the question, -1..1."""

    text: str
    score: float


@omni.message
class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that `retrieve` found for a question, best first."""

    facts: list[Fact]


@omni.message
class Grounded(msgspec.Struct, frozen=True, kw_only=True):
    """A question beside what was found for it: what the fan-in of `prompt` joins."""

    question: Question
    facts: list[Fact]


@omni.message
class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of the language model, and how it came about, for the client."""

    messages: list[Turn]
    aloud: bool
    transcript: str | None
    facts: list[Fact]


@omni.message
class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Sent ahead of the first token: what was understood, and which facts were found."""

    transcript: str | None
    facts: list[Fact]


@omni.message
class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. finish: ``stop`` or ``length``, in OpenAI's words."""

    text: str
    aloud: bool
    prompt_tokens: int
    completion_tokens: int
    finish: str


@omni.message
class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A text to read aloud: what a speech request becomes. speed: 1.0 is the voice's own."""

    text: str
    voice: str | None
    speed: float
