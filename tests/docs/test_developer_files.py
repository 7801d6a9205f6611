"""The hosted workflow and the commit hooks name what there is, and run what `.ci/run` and `make check` run."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from tests import index, order
from tests.docs.blocks import ROOT

WORKFLOW = ".github/workflows/ci.yml"
#: The hosted runner has no kit: it builds images with docker, and runs a part of the cluster tests with KUBECONFIG.
OTHERWISE = {"cluster-test", "images"}


def make_targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z][a-z-]*)", text))


def steps() -> str:
    """All commands of the hosted workflow."""
    jobs: dict[str, Any] = yaml.safe_load((ROOT / WORKFLOW).read_text())["jobs"]
    return "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])


def test_the_hosted_workflow_runs_what_ci_run_runs() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    wanted = make_targets("\n".join(line.partition("#")[0] for line in lines))
    assert wanted >= {"check", "test", "voice-test", "cluster-test"}
    assert wanted - make_targets(steps()) == OTHERWISE


def test_the_hosted_workflow_names_tests_that_exist_and_every_folder_with_cluster_tests() -> None:
    comment = "".join(line for line in (ROOT / WORKFLOW).read_text().splitlines() if line.startswith("#"))
    named = set(re.findall(r"tests/[\w/.]+", steps()))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    paths = named | set(re.findall(r"tests/[\w/]+(?:\.py)?", comment))
    here = {f"tests/{each.path}" for each in index.tests() if ("cluster", "") in each.marks}
    assert {path for path in here if not {path, path.rpartition("/")[0]} & paths} == set()


def test_the_hooks_are_what_make_check_runs() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {" ".join(hook["entry"].split()[:2]).removeprefix(".venv/bin/") for hook in repository["hooks"]}
    makefile = (ROOT / "Makefile").read_text()
    checks = re.search(r"^check: ([a-z ]+)", makefile, re.MULTILINE)
    assert checks is not None
    wanted = set()
    for target in checks.group(1).split():
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert recipe is not None, target
        wanted |= {" ".join(line.split()[:2]) for line in recipe.group(1).replace("$(BIN)/", "").splitlines()}
    assert entries == wanted | {"make crds"}


def test_every_package_of_the_wheel_has_types_for_who_imports_it() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert [path for path in built["packages"] if not (ROOT / path / "py.typed").is_file()] == []


def test_the_files_that_start_first_exist_and_no_other_starts_before_them() -> None:
    named = (*order.LONGEST, *order.FOLDERS)
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []
    assert [order.place(name) for name in named] == list(range(len(named)))
    assert order.place("e2e/test_hooks.py") == order.place("e2e") < order.place("rules/test_handover.py") == len(named)
