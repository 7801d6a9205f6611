"""Times that stages report (``segments``, ``words``) as subtitles: SubRip (``srt``) and WebVTT (``vtt``). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from stage_runtime.errors import RequestError

FORMATS: Final = ("srt", "vtt")
LINE: Final = 84  # characters of a cue that is made of words: two lines of a screen
LONG_S: Final = 7.0  # such a cue is not shown for longer
PAUSE_S: Final = 1.0  # and does not span a longer silence


class Cue(msgspec.Struct, frozen=True):
    """A text and when it is shown, in seconds."""

    start: float
    end: float
    text: str


def cues(*, segments: Any, words: Any, text: str, duration: Any, by_word: bool) -> list[Cue]:
    """segments, words: as stages report them; None: they do not. by_word: a cue for each word.

    Raises: RequestError: stage_failed: no stage says when anything was said, or what one says is not a time.
    """
    if words and (by_word or not segments):
        found = [_cue("words", "word", index, one) for index, one in enumerate(_listed("words", words))]
        return found if by_word else list(_joined(found))
    if by_word:
        raise RequestError("stage_failed", "timestamp_granularities: no stage gave an omni.Note named words")
    if segments:
        return [_cue("segments", "text", index, one) for index, one in enumerate(_listed("segments", segments))]
    if not _plain(text):
        return []
    if not _is_time(duration):
        problem = "expected an omni.Note named segments or words for subtitles, got none, and the file has no length"
        raise RequestError("stage_failed", problem)
    return [Cue(0.0, float(duration), _plain(text))]


def srt(shown: Sequence[Cue]) -> str:
    """SubRip's form."""
    parts = (
        f"{number}\n{_stamp(one.start, ',')} --> {_stamp(one.end, ',')}\n{one.text.replace('-->', '->')}\n"
        for number, one in enumerate(shown, 1)
    )
    return "\n".join(parts)


def vtt(shown: Sequence[Cue]) -> str:
    """WebVTT's form."""
    parts = (f"{_stamp(one.start, '.')} --> {_stamp(one.end, '.')}\n{_escaped(one.text)}\n" for one in shown)
    return "\n".join(["WEBVTT\n", *parts])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _stamp(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    minutes, thousandths = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{thousandths // 1000:02}{point}{thousandths % 1000:03}"


def _listed(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise RequestError("stage_failed", f"omni.Note {name}: expected a list, got {type(given).__name__}")
    return given


def _cue(name: str, field: str, index: int, given: Any) -> Cue:
    place = f"omni.Note {name}[{index}]"
    if not isinstance(given, dict) or not isinstance(given.get(field), str):
        raise RequestError("stage_failed", f"{place}: expected an object with {field}, start and end")
    start: Any = given.get("start")
    end: Any = given.get("end")
    if not _is_time(start) or not _is_time(end):
        problem = f"{place}: expected start and end as seconds, got {start!r:.40} and {end!r:.40}"
        raise RequestError("stage_failed", problem)
    begin = float(start)
    return Cue(begin, max(begin, float(end)), _plain(given[field]))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 360_000


def _plain(text: str) -> str:
    """The text on one line: an empty line would end the cue."""
    return " ".join(text.split())


def _joined(words: Sequence[Cue]) -> Iterator[Cue]:
    """Words as cues that a reader can follow."""
    held: Cue | None = None
    for one in words:
        if held is None:
            held = one
            continue
        text = f"{held.text} {one.text}"
        if len(text) > LINE or one.end - held.start > LONG_S or one.start - held.end > PAUSE_S:
            yield held
            held = one
        else:
            held = Cue(held.start, max(held.end, one.end), text)
    if held is not None:
        yield held
