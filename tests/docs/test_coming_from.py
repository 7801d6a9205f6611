"""docs/coming-from.md: what it names on our side exists, its links hold (`test_site`), its pipeline plans."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stage_runtime as omni
from omnipipeline_spec import loading, planning
from stage_runtime.cli.running import bench
from stage_runtime.cli.running.measuring import flags, prompts, statistics
from tests.cli.test_bench_vocabulary import VLLM
from tests.docs.blocks import ROOT, blocks

PAGE = "docs/coming-from.md"
OURS = [
    term
    for line in (ROOT / PAGE).read_text().splitlines()
    if line.startswith("| ")
    for term in re.findall(r"`([^`]+)`", line.split(" | ")[-1])
]
SETTINGS = {*omni.Autoregressive.__struct_fields__, "fn", "max_batch", "concurrency"}
FIELDS = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/config.md").read_text(), re.MULTILINE))
OTHER = {"OmniPipeline", "__init__", "__call__", "X-Request-Timeout", "kubectl apply -f FILE", "model"}
BENCH = {name for option in bench.command.params for name in option.opts} | {
    *flags.BACKENDS,
    *prompts.DATASETS,
    *statistics.METRICS,
}


@pytest.mark.parametrize("term", sorted(set(OURS)))
def test_a_term_of_ours_exists(term: str) -> None:
    if term in OTHER or term.split()[0] in BENCH:
        return
    if term.startswith("omni "):
        _, command, *flags = term.split()
        shown = subprocess.run(
            [Path(sys.executable).with_name("omni"), command, "--help"], capture_output=True, text=True, timeout=100
        )
        assert shown.returncode == 0, shown.stderr
        assert all(flag in shown.stdout for flag in flags if flag.startswith("-"))
        return
    if term.startswith("omni."):
        names, arguments = term.removeprefix("omni.").partition("(")[::2]
        assert names in omni.__all__
        assert set(re.findall(r"(\w+)=", arguments)) <= SETTINGS
        return
    name = re.match(r"\w+", term)
    assert name is not None and name.group() in SETTINGS | FIELDS


def test_its_pipeline_plans_one_process() -> None:
    [pipeline] = blocks(PAGE, "yaml")
    planned = planning.plan(loading.loads(pipeline).spec)
    assert [group.name for unit in planned.units for group in unit.groups] == ["llm"]


def test_its_table_has_every_option_of_vllms_benchmark() -> None:
    table = (ROOT / PAGE).read_text().partition("### `vllm bench serve`")[2].partition("## Ray Serve")[0]
    named = {term for line in table.splitlines() for term in re.findall(r"`(--[^` ]+)`", line.split(" | ")[0])}
    patterns = [name.removesuffix("*") for name in named if name.endswith("*")]
    here = {name for name in VLLM if name in named or any(name.startswith(one) for one in patterns)}
    assert here == set(VLLM)
    assert {name for name in named if not name.endswith("*")} <= set(VLLM)
