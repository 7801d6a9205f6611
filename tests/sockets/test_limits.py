"""The new peer is refused with the name of a reached limit, and what runs goes on."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stage_runtime.sockets.endpoints import limits

SCRIPT = """
import asyncio, json, resource, sys
from stage_runtime.errors import LimitReached
from stage_runtime.sockets.endpoints import limits
from tests.sockets.peers import End, introduce

async def main(folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    hub, leaf = End("hub", f"ipc://{folder}/hub"), End("leaf", f"ipc://{folder}/leaf")
    introduce(hub, leaf)
    others, problem = [], None
    try:
        for number in range(200):
            others.append(End(f"p{number}", f"ipc://{folder}/{number}"))
            hub.channels.connect(f"p{number}", others[-1].endpoint)
            others[-1].channels.close()
    except LimitReached as error:
        problem = str(error)
    except OSError as error:
        problem = repr(error)
    hub.send("leaf", "still here")
    await leaf.listener.until(lambda: leaf.listener.received_words == ["still here"])
    print(json.dumps(problem))

asyncio.run(main(sys.argv[1]))
"""


HOLES = """
import os, resource
from stage_runtime.errors import LimitReached
from stage_runtime.sockets.endpoints import limits
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
opened = []
try:
    while True:
        opened.append(os.dup(0))
except OSError:
    pass
free = limits.KEPT_FREE
for descriptor in opened[: 2 * free : 2]:  # every second one
    os.close(descriptor)
limits.check()
os.dup(0)
try:
    limits.check()
except LimitReached as error:
    print(error)
"""


ASLEEP = """
import asyncio, contextlib, json, logging, os, sys
from tests.sockets.peers import PATIENCE_S, End, ends, introduce

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)

@contextlib.contextmanager
def left(count):
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(0))
    for descriptor in opened[:count]:
        os.close(descriptor)
    yield
    for descriptor in opened[count:]:
        os.close(descriptor)

async def frames(a, b):
    with left(10):
        a.send("bb", "second")
        await a.listener.until(lambda: bool(a.listener.lost_peers))

async def frames_to_one_that_is_connected(a, b):
    with left(30):
        a.send("bb", "second")
        await b.listener.until(lambda: b.listener.received_words == ["first", "second"])

async def acks(a, b):
    with left(10):
        b.send("aa", "back")
        assert await b.channels.settled(PATIENCE_S), "an ack goes by the connection that its frame came by"

async def main(what, folder):
    a = End("aa", f"ipc://{folder}/aa", idle_after_s=0.1, dead_after_s=5.0)
    b = End("bb", f"ipc://{folder}/bb")
    async with ends(a, b):
        introduce(a, b)
        a.send("bb", "first")
        b.send("aa", "there")
        link = a.channels.link("bb")
        await b.listener.until(lambda: b.listener.received_words == ["first"])
        await a.listener.until(lambda: a.listener.received_words == ["there"] and link.connection is None)
        await what(a, b)
        lost = [peer for peer, _ in a.listener.lost_peers]
        print(json.dumps([lost, a.channels.counters["limits"] > 0]))

asyncio.run(main(globals()[sys.argv[1]], sys.argv[2]))
"""


@pytest.mark.parametrize(("what", "lost"), [("frames", ["bb"]), ("frames_to_one_that_is_connected", []), ("acks", [])])
def test_a_link_that_cannot_be_woken_at_a_limit_is_refused_with_its_name(what: str, lost: list[str]) -> None:
    """A peer with frames that wait is unreachable at once; an ack needs no connection of its own. A peer that is
    connected to the process may have some of the descriptors that are kept free.
    """
    folder = tempfile.mkdtemp(prefix="omni")
    try:
        run = subprocess.run(
            ["bash", "-c", 'ulimit -n 200 && exec "$@"', "-", sys.executable, "-c", ASLEEP, what, folder],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            timeout=100,
        )
    finally:
        shutil.rmtree(folder)
    assert run.returncode == 0, run.stderr
    refused = bool(lost)
    assert json.loads(run.stdout) == [lost, refused]
    assert run.stderr.count("; peer: 'bb'") == refused and ("a link cannot be connected" in run.stderr) == refused


def test_free_descriptors_are_counted_wherever_they_are() -> None:
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert "RLIMIT_NOFILE" in run.stdout and "fewer than 64 are left" in run.stdout


def test_as_many_descriptors_are_allowed_as_may_be() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import resource; from stage_runtime.sockets.endpoints import limits; "
            "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400)); "
            "print(limits.raise_limits(), resource.getrlimit(resource.RLIMIT_NOFILE))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split(maxsplit=1) == ["400", "(400, 400)\n"]


@pytest.mark.proves("no-descriptors")
def test_at_the_limit_of_descriptors_a_new_peer_is_refused_and_others_are_still_spoken_to() -> None:
    folder = tempfile.mkdtemp(prefix="omni")
    code = SCRIPT.replace(
        "for number in range(200):\n", "for number in range(200):\n            FILES.append(open('/dev/null'))\n"
    )
    try:
        run = subprocess.run(
            [sys.executable, "-c", "FILES = []\n" + code, folder],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            timeout=100,
        )
    finally:
        shutil.rmtree(folder)
    assert run.returncode == 0, run.stderr
    problem = json.loads(run.stdout)
    assert problem is not None
    assert "RLIMIT_NOFILE" in problem and "raise the hard limit" in problem


@pytest.mark.proves("no-memory")
@pytest.mark.parametrize(
    ("most", "current", "inactive", "refused"),
    [
        ("max", 10, 0, False),
        (1 << 30, 1 << 29, 0, False),
        (1 << 30, (1 << 30) - (1 << 20), 0, True),
        (1 << 30, (1 << 30) - (1 << 20), 1 << 29, False),  # most of it is cache, which the kernel gives back
    ],
)
@pytest.mark.parametrize("version", [2, 1])
def test_a_container_without_memory_refuses_with_what_to_raise(
    tmp_path: Path, version: int, most: int | str, current: int, inactive: int, refused: bool
) -> None:
    container(tmp_path, version, most, current, inactive)
    problem = limits.memory_problem(tmp_path)
    assert (problem is not None) == refused
    assert problem is None or "resources.limits.memory" in problem


@pytest.mark.parametrize("version", [2, 1])
def test_the_limit_of_a_container_is_known_without_what_it_uses(tmp_path: Path, version: int) -> None:
    container(tmp_path, version, 1 << 30, 0, 0)
    assert limits.memory_limit(tmp_path) == 1 << 30
    container(tmp_path, version, "max", 0, 0)
    assert limits.memory_limit(tmp_path) is None


def container(folder: Path, version: int, most: int | str, current: int, inactive: int) -> None:
    """The files of a control group, of either version."""
    if version == 2:
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
        return
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    (memory / "memory.limit_in_bytes").write_text(f"{2**63 - 4096 if most == 'max' else most}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{current}\n")
    # The value without "total_" is of the group alone, not of the groups in it.
    (memory / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {inactive}\n")


def test_where_there_is_no_container_memory_is_not_looked_at(tmp_path: Path) -> None:
    assert limits.memory_problem(tmp_path) is None
    assert limits.memory_limit(tmp_path) is None
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
