"""The prompts of a benchmark: random words, conversations in ShareGPT's form, or prompts of a file."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from stage_runtime.errors import UNDECODABLE, ConfigurationError

DATASETS: Final = ("random", "sharegpt", "custom", "prefix_repetition")
#: Words of a conversation's prompt or answer, of its prompt, of both together: other ones are left out, as
#: `vllm bench serve` does by tokens. A model of a short context would refuse the longest.
LEAST: Final = 4
MOST_OF_PROMPT: Final = 1024
MOST: Final = 2048
_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


class Prompt(msgspec.Struct, frozen=True):
    """One request. output: the most tokens of its answer."""

    text: str
    output: int


def random_prompts(
    count: int, *, input_len: int, output_len: int, random: Random, prefix_len: int = 0, range_ratio: float = 0.0
) -> list[Prompt]:
    """input_len: words, each of about one token. No two begin alike without a prefix, so that no cache answers.

    prefix_len: words before them that all prompts have in common. range_ratio: lengths of prompts and answers are drawn
    evenly from ``length * (1 - ratio)`` to ``length * (1 + ratio)``.
    """
    prefix = random.choices(_WORDS, k=prefix_len)

    def drawn(length: int) -> int:
        low, high = round(length * (1 - range_ratio)), round(length * (1 + range_ratio))
        return max(1, random.randint(low, high) if range_ratio else length)

    return [_of_words(prefix, drawn(input_len), drawn(output_len), random) for _ in range(count)]


def repeated_prefixes(
    count: int, *, prefixes: int, prefix_len: int, suffix_len: int, output_len: int, random: Random
) -> list[Prompt]:
    """Prompts that begin with one of some prefixes each, as many with each, mixed. Lengths are words."""
    known = [random.choices(_WORDS, k=prefix_len) for _ in range(prefixes)]
    found = [_of_words(known[index % prefixes], suffix_len, output_len, random) for index in range(count)]
    random.shuffle(found)
    return found


def _of_words(prefix: list[str], length: int, output: int, random: Random) -> Prompt:
    return Prompt(" ".join([*prefix, *random.choices(_WORDS, k=length)]), output)


def of_file(
    path: Path, dataset: str, count: int, *, output_len: int | None, random: Random | None, oversample: bool = True
) -> list[Prompt]:
    """The prompts of a file, ``count`` or fewer. oversample: it is read again from its beginning where it has fewer.

    random: shuffles them; None leaves the file's order.
    Raises: ConfigurationError: names the place of what is not in the dataset's form.
    """
    content = path.read_bytes()
    found = _conversations(path, content, output_len) if dataset == "sharegpt" else _lines(path, content)
    if not found:
        raise ConfigurationError(f"{path}: expected prompts of the dataset {dataset}, got none")
    if random is not None:
        random.shuffle(found)
    chosen = itertools.islice(itertools.cycle(found) if oversample else found, count)
    return [one if output_len is None else Prompt(one.text, output_len) for one in chosen]


def _conversations(path: Path, content: bytes, output_len: int | None) -> list[Prompt]:
    """ShareGPT: the first two turns of each; the length of the second one, in words, is that of the answer unless
    ``output_len`` is.
    """
    try:
        given = msgspec.json.decode(content)
    except UNDECODABLE as error:
        raise ConfigurationError(f"{path}: expected JSON in ShareGPT's form: {error}") from error
    if not isinstance(given, list):
        raise ConfigurationError(f"{path}: expected a list of conversations, got {type(given).__name__}")
    found = []
    for index, one in enumerate(given):
        turns = one.get("conversations") if isinstance(one, dict) else None
        if not isinstance(turns, list):
            raise ConfigurationError(f"{path}: [{index}].conversations: expected a list of turns")
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f"{path}: [{index}].conversations: expected turns with a text as value")
        lengths = [len(str(text).split()) for text in texts]
        if len(texts) == 2 and _is_typical(lengths[0], lengths[1], output_len):
            found.append(Prompt(str(texts[0]), lengths[1]))
    return found


def _is_typical(asked: int, answered: int, output_len: int | None) -> bool:
    long_enough = asked >= LEAST and (answered >= LEAST or output_len is not None)
    return long_enough and asked <= MOST_OF_PROMPT and asked + (output_len or answered) <= MOST


def _lines(path: Path, content: bytes) -> list[Prompt]:
    """An object with ``prompt`` on each line, and ``output_tokens`` where an answer is to have so many."""
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            given: Any = msgspec.json.decode(line)
        except UNDECODABLE as error:
            raise ConfigurationError(f"{path}:{number}: expected JSON: {error}") from error
        prompt = given.get("prompt") if isinstance(given, dict) else None
        output = given.get("output_tokens", 256) if isinstance(given, dict) else None
        if not isinstance(prompt, str) or type(output) is not int or output < 1:
            raise ConfigurationError(f"{path}:{number}: expected an object with a text as prompt")
        found.append(Prompt(prompt, output))
    return found
