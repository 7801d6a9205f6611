"""Stores and prefixes that differ from AWS': other ETags, names that cannot be files, a list of hashes made again."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.weights import folders
from stage_runtime.weights.cache import Fetch
from stage_runtime.weights.progress import Progress
from stage_runtime.weights.source import Source
from tests.patience import patience
from tests.weights import s3_server
from tests.weights.s3_server import BUCKET, S3

URL = f"s3://{BUCKET}/tiny"
FILES = {"config.json": b"{}", "weights/model.bin": bytes(range(256)) * 1000}
ETAGS: dict[str, Callable[[str], str]] = {
    "upper": lambda etag: f'"{etag.upper()}"',
    "base64": lambda etag: f'"CJ+{etag[:4].upper()}=="',
    "weak": lambda etag: f'W/"{etag[:8]}"',
    "bare": lambda etag: etag,
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server.serving() as server:
        yield server


@pytest.fixture
def s3(server: S3) -> S3:
    server.clear()
    for path, content in FILES.items():
        server.put(f"tiny/{path}", content)
    return server


def fetched(s3: S3, root: Path) -> dict[str, bytes]:
    folder = Fetch(Source(URL, s3.environment()), root, Progress(print), pause_s=0.01).ensure()
    found = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    found.pop(folders.MANIFEST)
    return found


@pytest.mark.parametrize("written", [name for name in ETAGS if name != "bare"])
def test_an_etag_is_sent_back_as_the_store_wrote_it(s3: S3, tmp_path: Path, written: str) -> None:
    s3.etag = ETAGS[written]
    assert fetched(s3, tmp_path) == FILES


@pytest.mark.parametrize("written", ETAGS)
def test_a_file_that_is_replaced_is_noticed_whatever_its_etag(s3: S3, written: str) -> None:
    s3.etag = ETAGS[written]
    source = Source(URL, s3.environment())
    listed = {each.path: each for each in source.files()}["config.json"]
    s3.put("tiny/config.json", b"[]")
    with pytest.raises(ConfigurationError, match=r"config.json was replaced while it was fetched"):
        list(source.chunks(listed, 0))


def test_a_list_of_hashes_may_name_itself(s3: S3, tmp_path: Path) -> None:
    # ``sha256sum * > SHA256SUMS`` once more: the shell has emptied the list before it is hashed.
    listed = FILES | {"SHA256SUMS": b""}
    sums = "".join(f"{hashlib.sha256(each).hexdigest()}  {path}\n" for path, each in listed.items()).encode()
    s3.put("tiny/SHA256SUMS", sums)
    assert fetched(s3, tmp_path) == FILES | {"SHA256SUMS": sums}


def test_an_object_that_goes_while_it_is_fetched_is_named(s3: S3) -> None:
    source = Source(URL, s3.environment())
    listed = {each.path: each for each in source.files()}["config.json"]
    s3.answers[f"/{BUCKET}/tiny/config.json"] = lambda _: (404, b"<Error><Code>NoSuchKey</Code></Error>")
    with pytest.raises(ConfigurationError) as caught:
        list(source.chunks(listed, 0))
    assert str(caught.value) == f"{URL}/config.json does not exist"


def test_a_disk_that_takes_no_more_is_named_by_its_file(s3: S3, tmp_path: Path) -> None:
    s3.put("tiny/weights/large.bin", bytes(1 << 20))
    # Blocks of 512 or 1,024 bytes: more than ``model.bin``, for files are fetched beside each other.
    command = f'ulimit -f 800; exec "$0" -m stage_runtime prefetch {URL} --folder {tmp_path}'
    found = subprocess.run(
        ["sh", "-c", command, sys.executable],
        env=dict(os.environ) | s3.environment(),
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert found.returncode == 1
    assert re.search(r"cannot fetch .*File too large: '/.*\.parts/weights/large.bin'\n$", found.stderr), found.stderr


def test_an_object_that_is_a_folder_of_others_is_refused_by_its_name(s3: S3) -> None:
    s3.put("tiny/weights", b"a file")
    with pytest.raises(ConfigurationError, match="'weights' is an object, and others lie below it as a folder"):
        Source(URL, s3.environment()).files()
