"""The length of a recording in a container that libsndfile does not know: webm and Matroska, mp4 and m4a. Pure.

Only headers are read: of webm its ``Duration``, or, where a browser or a pipe wrote none, the times of its blocks; of
mp4 the length of its sound track, of a fragmented one the samples that its fragments announce. No sound is decoded.
Lying files cost a walk over their headers: each step goes forward.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, TypeAlias

#: id, begin and end of an element's or a box's content
Part: TypeAlias = tuple[bytes, int, int]

_EBML: Final = b"\x1a\x45\xdf\xa3"
_INFO: Final = b"\x15\x49\xa9\x66"
_CLUSTER: Final = b"\x1f\x43\xb6\x75"
#: Elements whose content is elements: Segment, Info, Cluster, BlockGroup.
_MASTERS: Final = (b"\x18\x53\x80\x67", _INFO, _CLUSTER, b"\xa0")
_SCALE: Final = b"\x2a\xd7\xb1"  # nanoseconds of one tick
_DURATION: Final = b"\x44\x89"  # in ticks
_TIMECODE: Final = b"\xe7"  # of a cluster, in ticks
_BLOCKS: Final = (b"\xa3", b"\xa1")  # SimpleBlock, Block: a track's number, then ticks after the cluster's
_USUAL_SCALE: Final = 1_000_000

#: Boxes whose content is boxes.
_BOXES: Final = (b"moov", b"trak", b"mdia", b"mvex", b"moof", b"traf")
_HEAD: Final = 8  # bytes of a box's size and name


def duration_s(data: bytes) -> float | None:
    """Seconds; None: it is neither of these, has no sound, or ends before it says how long it is."""
    try:
        if data[:4] == _EBML:
            return _matroska_s(data)
        if data[4:8] == b"ftyp":
            return _mp4_s(data)
    except (struct.error, IndexError, ZeroDivisionError, OverflowError):  # it ends in the middle of a header
        return None
    return None


# --- Matroska (RFC 8794, RFC 9559) -------------------------------------------------------------------------------


def _matroska_s(data: bytes) -> float | None:
    scale, written = _USUAL_SCALE, None
    cluster, times = 0, list[int]()
    for name, begin, end in _elements(data):
        if name == _SCALE:
            scale = int.from_bytes(data[begin:end])
        elif name == _DURATION:
            written = struct.unpack(">d" if end - begin == 8 else ">f", data[begin:end])[0]
        elif name == _TIMECODE:
            cluster = int.from_bytes(data[begin:end])
        elif name in _BLOCKS:
            after = begin + _width(data[begin])
            times.append(cluster + int.from_bytes(data[after : after + 2], signed=True))
    if written is not None and written > 0:
        return float(written) * scale / 1e9
    if not times:
        return None
    *earlier, last = sorted(set(times))
    step = last - earlier[-1] if earlier else 0  # of the last block only its begin is known
    return (last + step - min(times)) * scale / 1e9 or None


def _elements(data: bytes) -> Iterator[Part]:
    """Every element but the masters, which are entered. An unknown length, as of a live stream, is that of the rest."""
    at = 0
    while at < len(data):
        id_width = _width(data[at])
        name = data[at : at + id_width]
        at += id_width
        width = _width(data[at])
        size = int.from_bytes(data[at : at + width]) & ((1 << 7 * width) - 1)
        at += width
        if name in _MASTERS:
            continue
        end = min(at + size, len(data))
        yield name, at, end
        at = end


def _width(first: int) -> int:
    """Bytes of a number, by its first byte. Raises: IndexError: it is not a number."""
    if not first:
        raise IndexError
    return 9 - first.bit_length()


# --- mp4 (ISO 14496-12) ------------------------------------------------------------------------------------------


class _Track:
    """One track of a file."""

    def __init__(self) -> None:
        self.id = 0
        self.is_sound = False
        self.rate = 0  #: Ticks of a second.
        self.ticks = 0  #: Ticks of the samples that are not in fragments.


def _mp4_s(data: bytes) -> float | None:
    tracks: list[_Track] = []
    ticks_of_sample: dict[int, int] = {}  # by track, where a fragment does not say
    in_fragments: dict[int, int] = {}
    fragment, usual = 0, 0
    for name, begin, _ in _boxes(data):
        match name:
            case b"trak":
                tracks.append(_Track())
            case b"tkhd" if tracks:
                tracks[-1].id = _uint(data, begin + (20 if data[begin] else 12))
            case b"mdhd" if tracks:
                _read_times(tracks[-1], data, begin)
            case b"hdlr" if tracks:
                tracks[-1].is_sound = data[begin + 8 : begin + 12] == b"soun"
            case b"trex":
                ticks_of_sample[_uint(data, begin + 4)] = _uint(data, begin + 12)
            case b"tfhd":
                fragment = _uint(data, begin + 4)
                usual = _usual_ticks(data, begin, ticks_of_sample.get(fragment, 0))
            case b"trun":
                in_fragments[fragment] = in_fragments.get(fragment, 0) + _run_ticks(data, begin, usual)
    sound = next((track for track in tracks if track.is_sound), None)
    ticks = 0 if sound is None else sound.ticks + in_fragments.get(sound.id, 0)
    return ticks / sound.rate if sound is not None and ticks else None


def _boxes(data: bytes) -> Iterator[Part]:
    """Every box, with those that hold others before what is in them."""
    at = 0
    while at + _HEAD <= len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        head = _HEAD
        if size == 1:
            size, head = struct.unpack_from(">Q", data, at + _HEAD)[0], 2 * _HEAD
        end = len(data) if size == 0 else at + max(size, head)
        yield name, at + head, min(end, len(data))
        at = at + head if name in _BOXES else end


def _read_times(track: _Track, data: bytes, begin: int) -> None:
    """Read a box ``mdhd``: version 1 has wider numbers."""
    if data[begin]:
        track.rate, track.ticks = _uint(data, begin + 20), struct.unpack_from(">Q", data, begin + 24)[0]
        unknown = (1 << 64) - 1
    else:
        track.rate, track.ticks = _uint(data, begin + 12), _uint(data, begin + 16)
        unknown = (1 << 32) - 1
    if track.ticks == unknown:
        track.ticks = 0


def _usual_ticks(data: bytes, begin: int, of_track: int) -> int:
    """How long the samples of a box ``tfhd`` are unless each says so."""
    flags = _uint(data, begin) & 0xFFFFFF
    at = begin + 8 + (8 if flags & 0x1 else 0) + (4 if flags & 0x2 else 0)
    return _uint(data, at) if flags & 0x8 else of_track


def _run_ticks(data: bytes, begin: int, usual: int) -> int:
    """How long all samples of a box ``trun`` are together."""
    flags, count = _uint(data, begin) & 0xFFFFFF, _uint(data, begin + 4)
    if not flags & 0x100:
        return count * usual
    at = begin + 8 + (4 if flags & 0x1 else 0) + (4 if flags & 0x4 else 0)
    step = 4 * (flags & 0xF00).bit_count()
    count = min(count, (len(data) - at) // step)
    return sum(_uint(data, at + step * sample) for sample in range(count))


def _uint(data: bytes, at: int) -> int:
    return int(struct.unpack_from(">I", data, at)[0])
