"""Standard output of `omni up`, whose reader may pause or leave."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator

import pytest

from stage_runtime.cli.serving.standard_output import Output

PATIENCE_S = 60.0
LINES = 5000  # of 100 bytes: more than a pipe and the room hold


class Reader:
    def __init__(self) -> None:
        self.end, self.theirs = os.pipe()

    def rest(self) -> str:
        """All that comes until the writing end is closed."""
        found = b""
        while chunk := os.read(self.end, 1 << 16):
            found += chunk
        return found.decode()


@pytest.fixture
def reader() -> Iterator[Reader]:
    one = Reader()
    yield one
    os.close(one.end)


def test_what_a_reader_who_pauses_misses_is_counted_where_it_is_missing(reader: Reader) -> None:
    output = Output(reader.theirs, held_nbytes=10_000)
    for number in range(LINES):
        output.write(f"{number:99d}\n")
    assert not output.finish(within_s=0.0)
    read: list[str] = []
    reading = threading.Thread(target=lambda: read.append(reader.rest()))
    reading.start()
    assert output.finish(PATIENCE_S)
    output.write("the end\n")
    assert output.finish(PATIENCE_S)
    os.close(reader.theirs)
    reading.join()
    *lines, end = read[0].splitlines()
    assert end == "the end"
    following, gaps = 0, 0
    for line in lines:  # what is held may be written, and held again, before the reader pauses for good
        missing = re.fullmatch(r"… (\d+) lines were not shown", line)
        gaps += missing is not None
        if missing is None:
            assert int(line) == following
        following += 1 if missing is None else int(missing[1])
    assert following == LINES
    assert gaps


def test_a_reader_who_reads_misses_nothing(reader: Reader) -> None:
    read: list[str] = []
    reading = threading.Thread(target=lambda: read.append(reader.rest()))
    reading.start()
    output = Output(reader.theirs)
    for number in range(LINES):
        output.write(f"{number}\n")
    assert output.finish(PATIENCE_S)
    os.close(reader.theirs)
    reading.join()
    assert read[0].splitlines() == [str(number) for number in range(LINES)]


def test_a_descriptor_that_does_not_block_is_waited_for(reader: Reader) -> None:
    os.set_blocking(reader.theirs, False)
    output = Output(reader.theirs)
    output.write("x" * (1 << 18))
    assert not output.finish(within_s=0.0)
    read: list[str] = []
    reading = threading.Thread(target=lambda: read.append(reader.rest()))
    reading.start()
    assert output.finish(PATIENCE_S)
    os.close(reader.theirs)
    reading.join()
    assert len(read[0]) == 1 << 18


def test_a_disk_that_is_full_is_reported_once_and_nothing_is_kept() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        output = Output(descriptor)
        broken = threading.Event()
        output.when_broken(broken.set)
        output.write("line\n")
        assert broken.wait(PATIENCE_S)
        assert output.error is not None and output.error.errno == errno.ENOSPC
        output.write("line\n")
        assert output.finish(within_s=0.0)
        again = threading.Event()
        output.when_broken(again.set)
        assert again.is_set()
    finally:
        os.close(descriptor)
