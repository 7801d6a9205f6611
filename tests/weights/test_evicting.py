"""Room in a folder of models that pipelines share: the least recently used go, never one that is read or fetched."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.weights import evicting

NOW = 1_000_000.0


def model(root: Path, name: str, nbytes: int, *, used_s_ago: float, part: int = 0) -> None:
    (root / f"{name}.v1").mkdir()
    (root / f"{name}.v1" / "model.bin").write_bytes(bytes(nbytes))
    if part:
        (root / f"{name}.v2.parts").mkdir()
        (root / f"{name}.v2.parts" / "model.bin").write_bytes(bytes(part))
    (root / name).symlink_to(f"{name}.v1")
    (root / f"{name}.lock").touch()
    os.utime(root / f"{name}.lock", (NOW - used_s_ago, NOW - used_s_ago))


def links(root: Path) -> set[str]:
    return {each.name for each in root.iterdir() if each.is_symlink()}


def make_room(root: Path, nbytes: int, bound: int) -> list[str]:
    said: list[str] = []
    evicting.make_room(root / "own", nbytes, bound, now=NOW, say=said.append)
    return said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Models a, b and c of 100 bytes each, a used last; b has 50 bytes of another version that never became whole."""
    model(tmp_path, "a", 100, used_s_ago=1000)
    model(tmp_path, "b", 100, used_s_ago=2000, part=50)
    model(tmp_path, "c", 100, used_s_ago=3000)
    return tmp_path


@pytest.mark.parametrize(
    "nbytes, bound, left",
    [
        (100, 450, {"a", "b", "c"}),
        (100, 449, {"a", "b"}),
        (100, 350, {"a", "b"}),
        (100, 349, {"a"}),
        (100, 200, {"a"}),
        (100, 100, set()),
    ],
)
def test_the_least_recently_used_are_deleted_until_there_is_room(
    root: Path, nbytes: int, bound: int, left: set[str]
) -> None:
    said = make_room(root, nbytes, bound)
    assert links(root) == left
    assert {each.name for each in root.iterdir() if each.is_dir() and not each.is_symlink()} == {
        f"{name}.{version}" for name in left for version in (("v1", "v2.parts") if name == "b" else ("v1",))
    }
    assert len(said) == 3 - len(left)


@pytest.mark.parametrize("held", ["c.v1", "c.lock"])
def test_a_model_that_is_read_or_fetched_stays(root: Path, held: str) -> None:
    reader = os.open(root / held, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    make_room(root, 100, 300)
    assert links(root) == {"a", "c"}
    os.close(reader)
    make_room(root, 100, 200)
    assert links(root) == {"a"}


def test_a_model_whose_stages_may_be_about_to_start_stays_and_the_bound_holds(root: Path) -> None:
    os.utime(root / "a.lock", (NOW - evicting.GRACE_S, NOW - evicting.GRACE_S))
    with pytest.raises(ConfigurationError, match="100 bytes must be fetched, 50 more than the bound of 150 bytes"):
        make_room(root, 100, 150)
    assert links(root) == {"a"}


def test_a_model_that_is_larger_than_the_bound_is_refused_and_its_own_parts_count(tmp_path: Path) -> None:
    (tmp_path / "own.v1.parts").mkdir()
    (tmp_path / "own.v1.parts" / "model.bin").write_bytes(bytes(60))
    make_room(tmp_path, 40, 100)
    with pytest.raises(ConfigurationError, match="the bound of 99 bytes"):
        make_room(tmp_path, 40, 99)


def test_room_that_another_process_is_about_to_fill_is_not_given_twice(tmp_path: Path) -> None:
    with (tmp_path / "a.lock").open("ab") as fetching:
        fcntl.flock(fetching, fcntl.LOCK_EX)
        evicting.make_room(tmp_path / "a", 100, 150, now=NOW, say=print)
        with pytest.raises(ConfigurationError, match="100 bytes must be fetched, 50 more than the bound of 150 bytes"):
            make_room(tmp_path, 100, 150)
        (tmp_path / "a.v1.parts").mkdir()
        (tmp_path / "a.v1.parts" / "model.bin").write_bytes(bytes(60))
        make_room(tmp_path, 50, 150)
        with pytest.raises(ConfigurationError, match="51 bytes must be fetched"):
            make_room(tmp_path, 51, 150)
    make_room(tmp_path, 90, 150)  # it was ended before it had the rest
