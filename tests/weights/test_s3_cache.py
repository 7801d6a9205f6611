"""A model from a real S3 server: whole or not seen, checked, gone on with, fetched once."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.containers import fetching
from stage_runtime.weights import checking, folders
from stage_runtime.weights.cache import Fetch
from stage_runtime.weights.progress import Progress, Report
from stage_runtime.weights.source import Interrupted, Source
from tests.patience import patience
from tests.ports import free_port
from tests.weights import s3_server
from tests.weights.s3_server import BUCKET, S3

URL = f"s3://{BUCKET}/tiny"
WEIGHTS = random.Random(0).randbytes(12 << 20)
STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start
FILES = {"config.json": b"{}", "weights/model.bin": WEIGHTS, "empty": b""}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server.serving() as server:
        yield server


@pytest.fixture
def s3(server: S3) -> S3:
    server.clear()
    for path, content in FILES.items():
        server.put(f"tiny/{path}", content)
    server.put("tinyer/other.bin", b"another model, whose address begins alike")
    return server


def fetch(s3: S3, root: Path, progress: Progress | None = None, said: list[str] | None = None) -> Fetch:
    source = Source(URL, s3.environment())
    say = (said if said is not None else []).append
    return Fetch(source, root, progress or Progress(say), say=say, pause_s=0.01)


def content(folder: str | Path) -> dict[str, bytes]:
    """The files of a model's folder, without the manifest."""
    found = {str(each.relative_to(folder)): each.read_bytes() for each in Path(folder).rglob("*") if each.is_file()}
    found.pop(folders.MANIFEST)
    return found


def local(root: Path) -> str:
    found = folders.local(URL, {"OMNI_MODELS_DIR": str(root)})
    assert found is not None
    return found


def test_the_files_below_a_prefix_come_whole_and_a_second_time_nothing_is_fetched(s3: S3, tmp_path: Path) -> None:
    progress = Progress(list[str]().append)
    fetch(s3, tmp_path, progress).ensure()
    assert content(local(tmp_path)) == FILES
    total = sum(map(len, FILES.values()))
    assert progress.report == Report(bytes_done=total, bytes_total=total)
    s3.asked.clear()
    fetch(s3, tmp_path).ensure()
    assert s3.asked == []


@pytest.mark.parametrize("size", [5 << 20, 6 << 20])
def test_a_file_uploaded_in_parts_is_checked_by_its_etag_or_by_a_second_transfer(
    s3: S3, tmp_path: Path, size: int
) -> None:
    s3.put_in_parts("tiny/weights/model.bin", WEIGHTS, size)
    fetch(s3, tmp_path).ensure()
    assert content(local(tmp_path)) == FILES
    usual = size == 5 << 20
    assert len(s3.ranges("tiny/weights/model.bin")) == (1 if usual else 2)


def kill_in_mid_file(s3: S3, root: Path, by: signal.Signals = signal.SIGKILL) -> int:
    """Run the fetch as a process, and kill it when half of the weights have been sent and some are on the disk.

    Returns: its exit code.
    """
    path, half, goes_on = f"/{BUCKET}/tiny/weights/model.bin", threading.Event(), threading.Event()

    def hold(piece: bytes) -> bytes:
        if s3.sent.get(path, 0) >= len(WEIGHTS) // 2:
            half.set()
            goes_on.wait(patience(60))
        return piece

    s3.between[path] = hold
    environment = {**os.environ, **s3.environment(), "OMNI_MODEL_PATH": URL, "OMNI_MODELS_DIR": str(root)}

    with subprocess.Popen([sys.executable, "-m", "stage_runtime", "prefetch"], env=environment) as process:
        try:
            assert half.wait(patience(60))
            [part] = wait_for_part(root)
            assert 0 < part.stat().st_size < len(WEIGHTS)
        finally:
            process.send_signal(by)
            code = process.wait(patience(60))
            goes_on.set()
    del s3.between[path]
    return code


def wait_for_part(root: Path) -> list[Path]:
    """The part of the weights, once bytes of it and the whole small file are on the disk."""
    clock = threading.Event()
    for _ in range(int(patience(60) / 0.02)):
        found = [each for each in root.rglob("*.parts/weights/model.bin") if each.stat().st_size]
        if found and any(each.stat().st_size for each in root.rglob("*.parts/config.json")):
            return found
        clock.wait(0.02)
    return []


def test_a_fetch_says_how_far_it_is_until_it_ends(s3: S3, tmp_path: Path) -> None:
    path, half, goes_on = f"/{BUCKET}/tiny/weights/model.bin", threading.Event(), threading.Event()

    def hold(piece: bytes) -> bytes:
        if s3.sent.get(path, 0) >= len(WEIGHTS) // 2:
            half.set()
            goes_on.wait(patience(60))
        return piece

    s3.between[path] = hold
    port = free_port()
    environment = {**os.environ, **s3.environment(), "OMNI_MODELS_DIR": str(tmp_path), "OMNI_PROGRESS_PORT": str(port)}
    with subprocess.Popen([sys.executable, "-m", "stage_runtime", "prefetch", URL], env=environment) as process:
        try:
            assert half.wait(patience(60))
            wait_for_part(tmp_path)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=patience(10)) as answer:
                found = json.load(answer)
        finally:
            goes_on.set()
        assert process.wait(patience(60)) == 0
    assert found["bytes_total"] == sum(map(len, FILES.values()))
    assert 0 < found["bytes_done"] < found["bytes_total"]


@pytest.mark.parametrize("port", ["", "no port", "99999999999", "9" * 5000, "taken"], ids=lambda port: port[:12])
def test_a_port_that_cannot_be_had_stops_no_fetch(port: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        given = str(taken.getsockname()[1]) if port == "taken" else port
        with fetching.serving(lambda: (1, 2), {"OMNI_PROGRESS_PORT": given}) as listens:
            assert listens is None


def test_a_machine_without_a_thread_for_a_server_stops_no_fetch() -> None:
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        with fetching.serving(lambda: (1, 2), {"OMNI_PROGRESS_PORT": "0"}) as listens:
            assert listens is None
    finally:
        threading.stack_size(before)


def test_a_process_without_a_descriptor_for_a_server_stops_no_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_event_loop() -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "new_event_loop", new_event_loop)
    with fetching.serving(lambda: (1, 2), {"OMNI_PROGRESS_PORT": "0"}) as listens:
        assert listens is None


def test_a_fetch_that_is_killed_shows_no_half_model_and_goes_on_where_it_stopped(s3: S3, tmp_path: Path) -> None:
    kill_in_mid_file(s3, tmp_path)
    with pytest.raises(ConfigurationError, match="has not been fetched"):
        local(tmp_path)
    [part] = tmp_path.rglob("*.parts/weights/model.bin")
    here = part.stat().st_size
    s3.asked.clear()
    fetch(s3, tmp_path).ensure()
    assert content(local(tmp_path)) == FILES
    assert s3.ranges("tiny/weights/model.bin") == [f"bytes={here}-{len(WEIGHTS) - 1}"]
    assert s3.ranges("tiny/config.json") == []


def test_a_fetch_that_is_asked_to_end_ends_in_mid_file(s3: S3, tmp_path: Path) -> None:
    """PID 1 of a container ignores the signal unless it handles it: a process that the signal ends has code -15."""
    assert kill_in_mid_file(s3, tmp_path, signal.SIGTERM) == 128 + signal.SIGTERM


def test_a_part_of_another_content_is_noticed_and_fetched_again(s3: S3, tmp_path: Path) -> None:
    kill_in_mid_file(s3, tmp_path)
    [part] = tmp_path.rglob("*.parts/weights/model.bin")
    with part.open("r+b") as file:
        file.write(b"damaged")
    fetch(s3, tmp_path).ensure()
    assert content(local(tmp_path)) == FILES


def test_connections_that_break_cost_nothing_that_has_come(s3: S3, tmp_path: Path) -> None:
    path, breaks = f"/{BUCKET}/tiny/weights/model.bin", itertools.count()

    def cut(piece: bytes) -> bytes:
        if next(breaks) % 64 == 63:
            raise ConnectionAbortedError
        return piece

    s3.between[path] = cut
    fetch(s3, tmp_path).ensure()
    assert content(local(tmp_path)) == FILES
    assert s3.sent[path] < 2 * len(WEIGHTS)


def test_bytes_that_change_on_the_way_are_fetched_again_and_never_seen(s3: S3, tmp_path: Path) -> None:
    path, said = f"/{BUCKET}/tiny/weights/model.bin", list[str]()
    flips = iter([True])
    s3.between[path] = lambda piece: bytes(len(piece)) if next(flips, False) else piece
    fetch(s3, tmp_path, said=said).ensure()
    assert content(local(tmp_path)) == FILES
    assert "weights/model.bin is not what its store says: it is fetched again" in said


@pytest.mark.parametrize("listed", [False, True], ids=["by its ETag", "by SHA256SUMS"])
def test_a_store_that_keeps_sending_something_else_is_refused(s3: S3, tmp_path: Path, listed: bool) -> None:
    if listed:
        sums = "".join(f"{hashlib.sha256(each).hexdigest()}  {path}\n" for path, each in FILES.items())
        s3.put("tiny/SHA256SUMS", sums.encode())
    s3.between[f"/{BUCKET}/tiny/weights/model.bin"] = lambda piece: bytes(len(piece))
    with pytest.raises(ConfigurationError, match=r"s3://models/tiny/weights/model.bin.*twice"):
        fetch(s3, tmp_path).ensure()
    with pytest.raises(ConfigurationError, match="has not been fetched"):
        local(tmp_path)


@pytest.mark.parametrize("damage", ["shorter", "changed", "deleted"])
def test_a_file_that_is_damaged_on_the_disk_is_refused_and_fetched_again(s3: S3, tmp_path: Path, damage: str) -> None:
    fetch(s3, tmp_path).ensure()
    weights = Path(local(tmp_path)) / "weights" / "model.bin"
    match damage:
        case "shorter":
            os.truncate(weights, 100)
        case "changed":
            with weights.open("r+b") as file:
                file.seek(1000)
                file.write(b"something else")
        case "deleted":
            weights.unlink()
    with pytest.raises(ConfigurationError, match=r"model.bin"):
        local(tmp_path)
    s3.asked.clear()
    fetch(s3, tmp_path).ensure(thorough=False)
    assert content(local(tmp_path)) == FILES
    assert {path for path, _ in s3.asked} == {f"/{BUCKET}/tiny/weights/model.bin"}


def test_a_change_that_hides_its_time_is_found_by_a_thorough_look(s3: S3, tmp_path: Path) -> None:
    fetch(s3, tmp_path).ensure()
    weights = Path(local(tmp_path)) / "weights" / "model.bin"
    before = weights.stat()
    weights.write_bytes(bytes(len(WEIGHTS)))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    fetch(s3, tmp_path).ensure(thorough=True)
    assert content(local(tmp_path)) == FILES


def test_another_content_of_the_store_is_another_version_and_the_last_one_stays(s3: S3, tmp_path: Path) -> None:
    first = fetch(s3, tmp_path).ensure()
    s3.put("tiny/config.json", b'{"second": true}')
    second = fetch(s3, tmp_path).ensure()
    assert content(first) == FILES, "who reads it goes on"
    assert content(second) == {**FILES, "config.json": b'{"second": true}'}
    s3.put("tiny/config.json", b'{"third": true}')
    fetch(s3, tmp_path).ensure()
    assert not Path(first).exists() and Path(second).exists()


def test_a_version_that_a_process_reads_stays_however_often_others_ask(s3: S3, tmp_path: Path) -> None:
    fetch(s3, tmp_path).ensure()
    reads = "import os, sys; from stage_runtime.weights import folders; print(folders.local(sys.argv[1], os.environ))"
    with subprocess.Popen(
        [sys.executable, "-c", f"{reads}; sys.stdout.flush(); input()", URL],
        env={**os.environ, "OMNI_MODELS_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout is not None
        first = reader.stdout.readline().decode().strip()
        for edit in (b'{"second": true}', b'{"third": true}'):
            s3.put("tiny/config.json", edit)
            for _ in range(2):
                fetch(s3, tmp_path).ensure()
                assert content(first) == FILES
        reader.communicate(b"\n", timeout=patience(30))
    fetch(s3, tmp_path).ensure()
    assert not Path(first).exists()


def test_parts_of_a_content_that_the_store_has_no_more_take_no_room_of_the_next_one(s3: S3, tmp_path: Path) -> None:
    def replaced(headers: object) -> tuple[int, bytes]:
        return 412, b""

    s3.answers[f"/{BUCKET}/tiny/config.json"] = replaced
    with pytest.raises(ConfigurationError, match="was replaced while it was fetched"):
        fetch(s3, tmp_path).ensure()
    stale = next(folders.link(tmp_path, URL).parent.glob("*.parts"))
    (stale / "weights").mkdir(exist_ok=True)
    (stale / "weights" / "model.bin").write_bytes(WEIGHTS)  # of the files that came whole before the refusal
    del s3.answers[f"/{BUCKET}/tiny/config.json"]
    s3.put("tiny/config.json", b'{"second": true}')
    bound = sum(map(len, FILES.values())) + 500
    again = Fetch(Source(URL, s3.environment()), tmp_path, Progress(print), bound=bound).ensure()
    assert content(again) == {**FILES, "config.json": b'{"second": true}'}
    assert not stale.exists()


def test_ten_at_once_fetch_a_model_once(s3: S3, tmp_path: Path) -> None:
    environment = {**os.environ, **s3.environment(), "OMNI_MODEL_PATH": URL, "OMNI_MODELS_DIR": str(tmp_path)}

    command = [sys.executable, "-m", "stage_runtime", "prefetch"]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(10)]
    codes = [each.wait(patience(120)) for each in processes]
    assert codes == [0] * 10
    assert content(local(tmp_path)) == FILES
    assert s3.sent[f"/{BUCKET}/tiny/weights/model.bin"] == len(WEIGHTS)


def test_a_quick_look_does_without_a_store_that_does_not_answer_where_the_model_is_whole(
    s3: S3, tmp_path: Path
) -> None:
    s3.answers[f"/{BUCKET}"] = lambda headers: (500, b"the store is down")
    with pytest.raises(Interrupted):
        fetch(s3, tmp_path).ensure(thorough=False)
    del s3.answers[f"/{BUCKET}"]
    fetch(s3, tmp_path).ensure()
    s3.answers[f"/{BUCKET}"] = lambda headers: (500, b"the store is down")
    said: list[str] = []
    assert str(fetch(s3, tmp_path, said=said).ensure(thorough=False)) == local(tmp_path)
    assert "the model that was fetched before is whole" in said[-1]
    (Path(local(tmp_path)) / "config.json").write_bytes(b"{ }")
    with pytest.raises(Interrupted):
        fetch(s3, tmp_path).ensure(thorough=False)


def test_a_bound_deletes_another_model_that_no_process_reads_any_more(s3: S3, tmp_path: Path) -> None:
    reads = "import os, sys; from stage_runtime.weights import folders; folders.local(sys.argv[1], os.environ); input()"
    environment = {**os.environ, "OMNI_MODELS_DIR": str(tmp_path)}
    fetch(s3, tmp_path).ensure()
    first = folders.link(tmp_path, URL)
    lock = Path(f"{first}.lock")
    os.utime(lock, (1, 1))
    other = Source(f"s3://{BUCKET}/tinyer", s3.environment())
    bound = sum(map(len, FILES.values())) + 500  # the first one's manifest has 400 to 500 bytes
    with subprocess.Popen(
        [sys.executable, "-c", f"{reads.replace('input()', 'print(flush=True); input()')}", URL],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"\n"
        with pytest.raises(ConfigurationError, match="the other models there are in use"):
            Fetch(other, tmp_path, Progress(print), bound=bound).ensure(thorough=False)
        reader.communicate(b"\n", timeout=patience(30))
    Fetch(other, tmp_path, Progress(print), bound=bound).ensure(thorough=False)
    assert not first.exists() and folders.link(tmp_path, other.url).exists()
    assert lock.exists(), "whoever waits for it has it open"
    fetch(s3, tmp_path).ensure()
    assert content(local(tmp_path)) == FILES
    assert lock.stat().st_mtime > 1


@pytest.mark.parametrize(
    "url, message",
    [
        (f"s3://{BUCKET}/nothing", "no object lies below it"),
        ("s3://nobodys/tiny", "s3://nobodys/tiny does not exist"),
        ("s3:///tiny", "is not s3://BUCKET/PREFIX"),
        ("s3://models/tiny?x=1", "is not s3://BUCKET/PREFIX"),
        ("s3://user:password@models/tiny", "is not s3://BUCKET/PREFIX"),
        ("s3://models/../tiny", "is not s3://BUCKET/PREFIX"),
    ],
)
def test_an_address_without_a_model_is_refused_by_its_name(s3: S3, tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Fetch(Source(url, s3.environment()), tmp_path, Progress(print)).ensure()


@pytest.mark.parametrize(
    "sums, message",
    [
        ("not a sum\n", "SHA256SUMS, line 1: expected 64 hex digits"),
        (f"{'0' * 64}  gone.bin\n", "SHA256SUMS names gone.bin, which is not there"),
    ],
)
def test_a_list_of_hashes_that_is_wrong_is_refused_by_its_line(s3: S3, tmp_path: Path, sums: str, message: str) -> None:
    s3.put("tiny/SHA256SUMS", sums.encode())
    with pytest.raises(ConfigurationError, match=message):
        fetch(s3, tmp_path).ensure()


def test_a_store_that_stays_away_ends_the_fetch_and_what_came_stays(s3: S3, tmp_path: Path) -> None:
    path, pieces = f"/{BUCKET}/tiny/weights/model.bin", itertools.count()

    def ends(piece: bytes) -> bytes:
        if next(pieces) >= 40:
            raise ConnectionAbortedError
        return piece

    s3.between[path] = ends
    with pytest.raises(Interrupted, match=r"weights/model\.bin"):
        fetch(s3, tmp_path).ensure()
    [part] = tmp_path.rglob("*.parts/weights/model.bin")
    here = part.stat().st_size
    assert here >= 1 << 20
    del s3.between[path]
    s3.asked.clear()
    fetch(s3, tmp_path).ensure()
    assert content(local(tmp_path)) == FILES
    assert s3.ranges("tiny/weights/model.bin") == [f"bytes={here}-{len(WEIGHTS) - 1}"]


@pytest.mark.parametrize("damaged", [b"{", b'{"url":"\xff"}'])
def test_a_manifest_that_cannot_be_read_costs_a_check_and_no_transfer(s3: S3, tmp_path: Path, damaged: bytes) -> None:
    fetch(s3, tmp_path).ensure()
    manifest = Path(local(tmp_path)) / folders.MANIFEST
    manifest.write_bytes(damaged)
    with pytest.raises(ConfigurationError, match=r"omnipipeline\.json"):
        local(tmp_path)
    s3.asked.clear()
    fetch(s3, tmp_path).ensure()
    assert content(local(tmp_path)) == FILES
    assert s3.asked == []


def test_a_prefix_with_more_objects_than_a_model_has_is_refused(s3: S3) -> None:
    source = Source(URL, s3.environment())
    assert len(source.files(at_most=3)) == 3
    with pytest.raises(ConfigurationError, match="s3://models/tiny: more than 2 objects lie below it"):
        source.files(at_most=2)


def test_a_list_of_hashes_that_is_too_long_is_refused_and_an_empty_one_says_nothing(s3: S3, tmp_path: Path) -> None:
    s3.put("tiny/SHA256SUMS", b"")
    fetch(s3, tmp_path).ensure()
    s3.put("tiny/SHA256SUMS", bytes(checking.MAX_SUMS_BYTES + 1))
    with pytest.raises(ConfigurationError, match=f"SHA256SUMS has {checking.MAX_SUMS_BYTES + 1} bytes, more than"):
        fetch(s3, tmp_path).ensure()


def test_an_object_that_became_longer_than_listed_is_refused(s3: S3, tmp_path: Path) -> None:
    source = Source(URL, s3.environment())
    listed = {each.path: each for each in source.files()}["config.json"]
    s3.put("tiny/config.json", b"{}, and more")
    with pytest.raises(ConfigurationError, match=r"config.json was replaced while it was fetched"):
        list(source.chunks(listed, 0))


def test_what_a_server_repeats_of_credentials_is_not_shown(s3: S3) -> None:
    environment = s3.environment() | {
        "AWS_ACCESS_KEY_ID": "AKIAPUBLIC",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_SESSION_TOKEN": "token-of-a-role",
    }

    def repeat(headers: Mapping[str, str]) -> tuple[int, bytes]:
        lower = {name.lower(): value for name, value in headers.items()}
        return 400, f"refused: {lower['x-amz-security-token']} {lower['authorization']}".encode()

    s3.answers[f"/{BUCKET}/tiny/config.json"] = repeat
    source = Source(URL, environment)
    with pytest.raises(Interrupted, match=r"refused: \*\*\*") as caught:
        source.text("config.json", 10)
    assert not [each for each in ("AKIAPUBLIC", "hidden", "token-of-a-role") if each in str(caught.value)]


def test_a_bound_that_is_not_a_quantity_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stage_runtime", "prefetch", URL, "--folder", str(tmp_path), "--bound", "NaN"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    cause = "--bound: 'NaN' is not a quantity: write a number with an optional unit, such as 500m, 12Gi or 8"
    assert (ended.returncode, ended.stderr.splitlines()) == (1, [f"cannot fetch {URL}: {cause}"])
