"""Modules beside a pipeline whose names are taken: refused where they would be imported instead, and only there."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.preparing import author_folder

ROOT = Path(__file__).parents[2]


def shadowing(folder: Path, *path: str) -> list[str]:
    return [name for name, _ in author_folder.shadowing(folder, [*path, *sys.path])]


@pytest.mark.parametrize(
    "file", ["numpy.py", "tokenize.py", "types.py", "queue.py", "profile.py", "h11.py", "msgspec/__init__.py", "zmq.so"]
)
def test_a_module_that_processes_need_is_named_with_its_file(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(ConfigurationError, match=rf"^{tmp_path / file} would be imported in place of the module \w+, "):
        author_folder.check(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "captions.py",
        "numpy.txt",
        "queue.yaml",
        "types/README.md",  # no package: the real module is taken
        "operator/omnipipeline_operator/__init__.py",
        "tests/__init__.py",
        "pipes.py",  # nobody imports it
        "time.py",  # built into the interpreter, and "os" is frozen: they come before any folder
        "os.py",
        "no-name.py",
    ],
)
def test_what_is_imported_in_place_of_nothing_is_accepted(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    author_folder.check(tmp_path)


def test_a_folder_from_which_python_cannot_import_is_refused_when_it_has_modules(tmp_path: Path) -> None:
    folder = tmp_path / "12:30"
    folder.mkdir()
    author_folder.check(folder)
    (folder / "captions.py").touch()
    with pytest.raises(ConfigurationError, match=rf"^{folder}: Python imports nothing from a folder with ':' in its"):
        author_folder.check(folder)


def test_a_module_that_is_imported_from_there_anyway_is_accepted(tmp_path: Path) -> None:
    package = tmp_path / "stage_runtime"
    package.mkdir()
    (package / "__init__.py").touch()
    assert shadowing(ROOT, str(ROOT)) == []
    assert shadowing(tmp_path) == ["stage_runtime"]


def test_an_authors_package_that_is_installed_too_is_accepted(tmp_path: Path) -> None:
    installed, beside = tmp_path / "installed", tmp_path / "beside"
    for folder in (installed, beside):
        folder.mkdir()
        (folder / "mine.py").touch()
    assert shadowing(beside, str(installed)) == []


def test_a_package_that_nothing_of_ours_needs_is_accepted(tmp_path: Path) -> None:
    assert importlib.metadata.version("pytest")  # it is installed, and no process imports it
    (tmp_path / "pytest.py").touch()
    assert shadowing(tmp_path) == []


def test_a_folder_that_is_not_there_has_no_modules(tmp_path: Path) -> None:
    author_folder.check(tmp_path / "nowhere")
    author_folder.check(author_folder.of("a.module:pipeline"))
