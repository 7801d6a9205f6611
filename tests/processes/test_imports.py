"""Packages that a process imports, and the garbage collector meanwhile."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stage_runtime import imports
from stage_runtime.engines.making import resolving


@pytest.fixture(autouse=True)
def _collector() -> None:
    assert gc.isenabled()


def test_nothing_is_collected_until_the_last_of_nested_imports_has_ended() -> None:
    with imports.uncollected():
        with imports.uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_ends_does_not_start_the_collector_of_another_threads_import() -> None:
    begun, end = threading.Event(), threading.Event()

    def other() -> None:
        with imports.uncollected():
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    with imports.uncollected():
        thread.start()
        begun.wait()
    assert not gc.isenabled()
    end.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_an_author_has_stopped_stays_stopped() -> None:
    gc.disable()
    try:
        with imports.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_import_that_fails_starts_the_collector_again() -> None:
    with pytest.raises(ModuleNotFoundError), imports.uncollected():
        importlib.import_module("a_module_that_nobody_has")
    assert gc.isenabled()


def test_an_authors_module_is_imported_without_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path, "watches_the_collector.py").write_text(
        "import gc\nFOUND = gc.isenabled()\ndef fn():\n    return FOUND, gc.isenabled()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        made = resolving.resolve("watches_the_collector:fn", field="factory")
        assert made() == (False, True)
    finally:
        sys.modules.pop("watches_the_collector", None)


@pytest.mark.parametrize(
    ("process", "absent"),
    [
        (
            "processes.stages.stage_process",
            {
                "torch",
                "transformers",
                "fastapi",
                "pydantic",
                "uvicorn",
                "httpx",
                "click",
                "rich",
                "cryptography",
                "http",
            },
        ),
        ("processes.coordinator_process", {"torch", "transformers", "httpx", "rich"}),
        ("engines.autoregressive.process.__main__", {"torch", "transformers", "fastapi", "httpx", "click", "rich"}),
        ("processes.containers.pod", {"torch", "numpy", "zmq", "fastapi", "httpx", "click", "rich"}),
    ],
)
def test_a_process_imports_no_package_that_only_others_need(process: str, absent: set[str]) -> None:
    program = f"import sys, stage_runtime.{process}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert absent & set(ran.stdout.split()) == set()


PROGRAM = """
import gc
from stage_runtime import imports

looked_at = []
gc.callbacks.append(lambda phase, info: phase == "start" and looked_at.append(len(gc.get_objects(0))))
{frozen}
with imports.uncollected():
    gc.freeze() if {foreign} else None
    made = [[] for _ in range(imports.MANY + 50_000)]
again = [[] for _ in range(2_000)]
print(max(looked_at) < imports.MANY, gc.get_freeze_count() > 1000)
cycle = made[0]
cycle.append(cycle)
del made, cycle, looked_at[:]
print(gc.collect() >= 1)
"""


@pytest.mark.parametrize(
    ("frozen", "foreign", "young", "left"),
    [
        ("pass", False, "True", "False"),
        ("imports.freeze()", False, "True", "False"),
        ("pass", True, "False", "True"),
    ],
)
def test_imported_objects_are_old_and_can_be_collected_unless_the_program_has_frozen_its_own(
    frozen: str, foreign: bool, young: str, left: str
) -> None:
    program = PROGRAM.format(frozen=frozen, foreign=foreign)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"{young} {left}", "True"]


@pytest.mark.nightly
def test_the_files_of_transformers_models_are_read_once() -> None:
    pytest.importorskip("transformers")
    program = """
import sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
from stage_runtime.engines.autoregressive.model import models
models.transformers().AutoModelForCausalLM
print(sum(path.endswith("modeling_mamba.py") for path in opened), sys.modules["transformers.models"].mamba.MambaConfig)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "1 <class 'transformers.models.mamba.configuration_mamba.MambaConfig'>\n"
