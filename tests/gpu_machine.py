"""The tests marked ``gpu`` on a bare machine without a network: ``make gpu-wheels`` here, ``make gpu-test`` there.

    python tests/gpu_machine.py collect FOLDER     with a network: wheels that such a machine may lack
    python tests/gpu_machine.py run FOLDER         there: unpack those that it lacks, run the tests, say what was proved

The machine has Python 3.12, torch with CUDA, transformers and numpy; everything else is in FOLDER. Standard library
alone, because nothing else is there when it starts. Ends with 0 where no test failed, also where all were skipped.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]
LIMIT_S: Final = 460.0  # 8 minutes, less what the start takes
#: None of these needs torch; their own dependencies come along.
WANTED: Final = (
    "msgspec PyYAML click rich pyzmq uvloop httptools fastapi uvicorn python-multipart httpx soundfile cryptography "
    "huggingface-hub prometheus-client psutil safetensors llguidance pillow pytest pytest-asyncio pytest-timeout "
    "hypothesis kopf jinja2"
).split()
#: Packages that are on every machine with torch and transformers, and large.
THERE: Final = {"numpy", "torch", "transformers", "tokenizers"}
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def collect(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for one in PLATFORMS for word in ("--platform", one)]
    options = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *options, *WANTED],
        cwd=REPOSITORY,
        check=True,
    )
    for wheel in folder.glob("*.whl"):
        if _name(wheel) in THERE:
            wheel.unlink()
    size = sum(one.stat().st_size for one in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB, in {folder}")


def run(folder: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="gpu-") as made:
        site, report = Path(made) / "site", Path(made) / "report.xml"
        _unpack(folder, site)
        paths = [str(REPOSITORY), str(REPOSITORY / "crds"), str(REPOSITORY / "operator"), str(site)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-c", _MACHINE], env=environ, check=True)
        # Warnings are errors elsewhere; here the versions are the machine's.
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-W", "default", f"--junitxml={report}"]
        command += _files()
        try:
            ended = subprocess.run(command, cwd=REPOSITORY, env=environ, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            print(f"not through after {LIMIT_S:.0f} s")
            return 1
        return _said(report) if report.exists() else ended


def _files() -> list[str]:
    """Modules with a test marked ``gpu``: others may import what the machine has not."""
    found = [one for one in sorted((REPOSITORY / "tests").rglob("test_*.py")) if "mark.gpu" in one.read_text("utf-8")]
    return [str(one.relative_to(REPOSITORY)) for one in found]


_MACHINE: Final = """
import platform
import torch, transformers
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, {gpu}")
"""


def _unpack(folder: Path, site: Path) -> None:
    """Wheels of packages that this Python lacks."""
    lacking = [str(wheel) for wheel in sorted(folder.glob("*.whl")) if not _installed(_name(wheel))]
    if not lacking:
        return
    print("unpacked:", ", ".join(_name(Path(one)) for one in lacking))
    options = ["--no-index", "--no-deps", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *lacking], check=True)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _name(wheel: Path) -> str:
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def _said(report: Path) -> int:
    """Print what was proved, what failed, and what was not run and why. Returns: the exit code."""
    cases = list(_cases(report))
    for title, kind in (("proved", "passed"), ("NOT proved: skipped", "skipped"), ("FAILED", "failed")):
        found = [(name, why) for name, outcome, why in cases if outcome == kind]
        print(f"\n{title}: {len(found)}")
        for name, why in found:
            print(f"  {name}" + (f": {why}" if why else ""))
    return 1 if any(outcome == "failed" for _name, outcome, _why in cases) else 0


def _cases(report: Path) -> Iterator[tuple[str, str, str]]:
    """Sentence, outcome and reason of each test."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        ends = [(kind, case.find(kind)) for kind in ("failure", "error", "skipped")]
        kind, end = next(((kind, end) for kind, end in ends if end is not None), ("passed", None))
        why = "" if end is None else " ".join((end.get("message") or "").split())[:160]
        yield name, "failed" if kind in ("failure", "error") else kind, why


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["collect", folder]:
            collect(Path(folder))
        case ["run", folder]:
            sys.exit(run(Path(folder)))
        case _:
            sys.exit(__doc__)
