"""The table of KV connectors: which stages ask for which, and that only those that are asked for are loaded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.connectors import registry
from stage_runtime.errors import ConfigurationError


@pytest.mark.parametrize(
    ("fields", "role", "wanted"),
    [
        ({}, "", []),
        ({}, "prefill", ["disaggregation"]),
        ({}, "decode", ["disaggregation"]),
        ({"kv_folder": "/kv"}, "", ["kv_folder"]),
    ],
)
def test_settings_and_role_choose_the_connector(fields: dict[str, Any], role: str, wanted: list[str]) -> None:
    spec = Autoregressive(model="tiny", **fields)
    registry.check(spec, role)
    assert [name for name, entry in registry.CONNECTORS.items() if entry.wanted(spec, role)] == wanted
    assert registry.crosses(spec, role) is bool(wanted)


def test_a_stage_that_asks_for_two_connectors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="disaggregation, kv_folder: blocks come from one of them"):
        registry.check(Autoregressive(model="tiny", kv_folder="/kv"), "decode")


def test_any_two_lines_of_the_table_refuse_each_other() -> None:
    line = registry.CONNECTORS["kv_folder"]
    asked = registry.ConnectorEntry(line.module, wanted=lambda spec, role: True)
    with pytest.raises(ConfigurationError, match="one, other: blocks come from one of them"):
        registry.check(Autoregressive(model="tiny"), "", {"one": asked, "line": line, "other": asked})


def test_the_settings_of_a_connector_that_is_not_asked_for_are_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="kv_folder_bytes"):
        registry.check(Autoregressive(model="tiny", kv_folder_bytes=0), "")


def test_every_module_of_the_table_has_both_functions() -> None:
    for entry in registry.CONNECTORS.values():
        module = entry.load()
        assert callable(module.check) and callable(module.connect)


def test_the_table_imports_no_connector_and_no_torch() -> None:
    name = registry.__name__
    program = f"import sys; import {name}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    found = set(done.stdout.split())
    assert "torch" not in found
    assert not found.intersection(entry.module for entry in registry.CONNECTORS.values())
