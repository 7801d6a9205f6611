"""The wheel and the sdist: built, complete, installed into an environment that has nothing else, and used there."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HELLO = ROOT / "examples/hello/pipeline.yaml"
PACKAGES = ("crds/omnipipeline_spec", "operator/omnipipeline_operator", "stage_runtime", "stage_models")
WITHIN_S = 3600
SHOWN = 8_000  # characters of a failed command's output

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(WITHIN_S + 60)]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stdout[-SHOWN:] + done.stderr[-SHOWN:]
    return done.stdout


def environment(folder: Path) -> Path:
    """The Python of a new one."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin/python"


def modules() -> set[str]:
    """The files of the packages that git knows, as they stand in a wheel."""
    found = set()
    for package in PACKAGES:
        for line in run("git", "ls-files", package).splitlines():
            found.add(line.removeprefix(str(Path(package).parent) + "/"))
    return found


def files(wheel: Path) -> set[str]:
    """Those of the packages."""
    with zipfile.ZipFile(wheel) as opened:
        return {one for one in opened.namelist() if ".dist-info/" not in one}


def test_what_is_built_is_whole_and_serves_where_nothing_else_is_installed(tmp_path: Path) -> None:
    checkout, built = tmp_path / "checkout", tmp_path / "built"
    run("git", "clone", "-q", ROOT, checkout)
    builder = environment(tmp_path / "builder")
    run(builder, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "hatchling>=1.27")
    run(builder, "-m", "hatchling", "build", "-d", built, cwd=checkout)
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    names = files(wheel)
    assert names == modules()
    with tarfile.open(sdist) as unpacked:
        unpacked.extractall(tmp_path / "sdist", filter="data")
    [source] = (tmp_path / "sdist").iterdir()
    run(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=source)
    [again] = (tmp_path / "again").glob("*.whl")
    assert files(again) == names

    fresh = environment(tmp_path / "fresh")
    run(fresh, ROOT / "tests/install_packages.py", f"{wheel}[runtime]")
    omni = fresh.with_name("omni")
    assert "omni, version " in run(omni, "--version", cwd=tmp_path)
    run(omni, "validate", "-f", HELLO, cwd=tmp_path)
    asked = f"import stage_runtime as omni; print(omni.testing.chat({str(HELLO)!r}, 'hello there').text)"
    assert run(fresh, "-P", "-c", asked, cwd=tmp_path).strip() == "HELLO!! THERE!!"
