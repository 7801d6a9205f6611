"""The prompts of a benchmark: random words, conversations in ShareGPT's form, or prompts of a file."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from stage_runtime.errors import ConfigurationError

DATASETS: Final = ("random", "sharegpt", "custom")
LEAST: Final = 4  # tokens of a conversation's prompt or answer; shorter ones say little (as `vllm bench serve` has it)
_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


class Prompt(msgspec.Struct, frozen=True):
    """One request. output: the most tokens of its answer."""

    text: str
    output: int


def random_prompts(count: int, *, input_len: int, output_len: int, random: Random) -> list[Prompt]:
    """input_len: words, each of about one token. No two begin alike, so that no cache answers."""
    return [Prompt(" ".join(random.choices(_WORDS, k=max(1, input_len))), output_len) for _ in range(count)]


def of_file(path: Path, dataset: str, count: int, *, output_len: int | None, random: Random) -> list[Prompt]:
    """``count`` prompts of a file, in an order by ``random``; it is read again from its beginning where it has fewer.

    Raises: ConfigurationError: names the place of what is not in the dataset's form.
    """
    content = path.read_bytes()
    found = _conversations(path, content) if dataset == "sharegpt" else _lines(path, content)
    if not found:
        raise ConfigurationError(f"{path}: expected prompts of the dataset {dataset}, got none")
    random.shuffle(found)
    chosen = itertools.islice(itertools.cycle(found), count)
    return [one if output_len is None else Prompt(one.text, output_len) for one in chosen]


def _conversations(path: Path, content: bytes) -> list[Prompt]:
    """ShareGPT: the first two turns of each; the length of the second one, in words, is that of the answer."""
    try:
        given = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
        if len(texts) == 2 and min(lengths) >= LEAST:
            found.append(Prompt(str(texts[0]), lengths[1]))
    return found


def _lines(path: Path, content: bytes) -> list[Prompt]:
    """An object with ``prompt`` on each line, and ``output_tokens`` where an answer is to have so many."""
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            given: Any = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path}:{number}: expected JSON: {error}") from error
        prompt = given.get("prompt") if isinstance(given, dict) else None
        output = given.get("output_tokens", 256) if isinstance(given, dict) else None
        if not isinstance(prompt, str) or type(output) is not int or output < 1:
            raise ConfigurationError(f"{path}:{number}: expected an object with a text as prompt")
        found.append(Prompt(prompt, output))
    return found
