"""Faults of pure modules that their tests find: mutmut changes one operator or constant at a time and runs them.

    .venv/bin/python -m tests.mutations            every suite of `SUITES`; the share of mutants that are killed, held
    .venv/bin/python -m tests.mutations credits    those whose name has this in it

Part of `make nightly`. Each suite runs in a copy of the tree, so that the checkout is never changed. A mutant that
survives is printed as a diff: it needs a test, or the code that it changes is not needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LEAST = 0.9  # of the mutants; the rest mostly changes nothing that anybody sees, such as a message's words


class Suite(NamedTuple):
    """One run. package: the folder that is mutated; modules: files in it; tests: what is run for each mutant."""

    name: str
    package: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]


def rules(room: str, name: str, *tests: str) -> Suite:
    return Suite(name, "stage_runtime", (f"rules/{room}/{name}.py",), tuple(f"tests/rules/{one}.py" for one in tests))


SUITES = (
    rules("binding", "pools", "test_pool_rules"),
    rules("flow", "streams", "test_stream_rules"),
    rules("flow", "turns", "test_turn_rules"),
    rules("binding", "subsets", "test_subset_rules"),
    Suite("gangs", "operator/omnipipeline_operator", ("changes/deciding/gangs.py",), ("tests/operator/test_gangs.py",)),
)


def prepare(suite: Suite, tree: Path) -> None:
    """Copy the tracked files into ``tree``, with mutmut's settings and the package at its top level."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    top = Path(suite.package).name
    if top != suite.package:  # `operator/` cannot be a package: it would hide the standard library's
        shutil.move(tree / suite.package, tree / top)
    also = [
        one for one in ("crds", "operator", "stage_runtime", "stage_models") if one != top and (tree / one).exists()
    ]
    settings = {
        "source_paths": [top],
        "only_mutate": [f"{top}/{one}" for one in suite.modules],
        "also_copy": also,
        "pytest_add_cli_args_test_selection": list(suite.tests),
        "use_git_change_detection": False,
        "track_dependencies": False,
    }
    (tree / "mutants" / "crds").mkdir(
        parents=True
    )  # a path that is missing when Python starts is never looked at again
    with (tree / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n")
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def run(suite: Suite, tree: Path) -> tuple[int, int]:
    """Returns: mutants killed, and all. Prints those that survive."""
    paths = [str(tree / "mutants"), str(tree / "mutants" / "crds"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def mutmut(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "mutmut", *arguments]  # -P: the copy itself is not mutated
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{suite.name}: mutmut {arguments[0]} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout

    mutmut("run")
    mutmut("export-cicd-stats")
    counts = json.loads((tree / "mutants" / "mutmut-cicd-stats.json").read_text())
    for line in mutmut("results").splitlines():
        name, _, status = line.strip().partition(": ")
        if status in ("survived", "no tests"):
            print(mutmut("show", name).strip(), flush=True)
    return counts["killed"] + counts["timeout"], counts["total"]


def main(names: Sequence[str]) -> int:
    low = []
    for suite in SUITES:
        if names and not any(name in suite.name for name in names):
            continue
        with tempfile.TemporaryDirectory(prefix="omni-mutants-") as folder:
            prepare(suite, Path(folder))
            killed, total = run(suite, Path(folder))
        print(f"{suite.name}: {killed} of {total} mutants are killed ({killed / max(total, 1):.0%})", flush=True)
        if not total or killed < LEAST * total:
            low.append(suite.name)
    if low:
        print(f"fewer than {LEAST:.0%} are killed in: {', '.join(low)}")
    return bool(low)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
