"""Questions that CI makes up anew: a fact nobody trained on, how to ask for it, and the word that proves the answer.

Only names, places and words that the whole chain handles, each of them heard again rightly in four different readings
(voice variation 0 to 1): `reliability` in this folder asks every one of them and counts. Left out for what the ear of
Whisper tiny.en makes of them: Simon ("is Simon": "assignment"), Rebecca, David, Nicholas, James, Laura, Amsterdam; for
what SmolLM2 does: dinosaur ("dino").
"""

from __future__ import annotations

import random
import re

import msgspec


class Puzzle(msgspec.Struct, frozen=True, kw_only=True):
    """fact: a line for the facts file. question: what is asked aloud. keyword: what the answer must hold."""

    fact: str
    question: str
    keyword: str


NAMES = (
    "Peter Thomas Michael William Henry Emily Alice Daniel Elizabeth Jennifer Alexander Benjamin Christopher Jonathan "
    "Samuel Barbara Margaret Victoria"
)
CITIES = "London Paris Berlin Madrid Rome Vienna Boston Chicago Dublin Tokyo Barcelona Moscow Sydney Toronto Stockholm"
WORDS = "banana elephant sunflower chocolate penguin mountain umbrella telephone"

_TEMPLATES = [
    ("The name of the baker is {}.", "What is the name of the baker?", NAMES),
    ("The name of the lighthouse keeper is {}.", "What is the name of the lighthouse keeper?", NAMES),
    ("The name of the new teacher is {}.", "What is the name of the new teacher?", NAMES),
    ("The winner of the race is {}.", "Who is the winner of the race?", NAMES),
    ("The spring meeting takes place in {}.", "Where does the spring meeting take place?", CITIES),
    ("The next train goes to {}.", "Where does the next train go?", CITIES),
    ("The password of the guest network is {}.", "What is the password of the guest network?", WORDS),
]


def all_puzzles() -> list[Puzzle]:
    """Every question that `pick` can choose, in a fixed order."""
    return [
        Puzzle(fact=fact.format(word), question=question, keyword=word)
        for fact, question, words in _TEMPLATES
        for word in words.split()
    ]


def pick(seed: int) -> Puzzle:
    return random.Random(seed).choice(all_puzzles())


def facts_with(puzzle: Puzzle, others: str) -> str:
    """A facts file of ``others`` and the puzzle's, without lines that begin as it does: they would contradict it."""
    subject = " ".join(puzzle.fact.split()[:5])
    kept = [line for line in others.splitlines() if not line.startswith(subject)]
    kept.insert(random.Random(puzzle.fact).randrange(len(kept) + 1), puzzle.fact)
    return "\n".join(kept) + "\n"


def word_error_rate(spoken: str, understood: str) -> float:
    """Insertions, deletions and substitutions per word that was said; case and punctuation do not count."""
    wanted, got = words(spoken), words(understood)
    row = list(range(len(got) + 1))
    for index, word in enumerate(wanted, start=1):
        previous, row[0] = row[0], index
        for at, other in enumerate(got, start=1):
            previous, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, previous + (word != other))
    return row[-1] / len(wanted)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())
