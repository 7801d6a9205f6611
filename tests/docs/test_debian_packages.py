"""Tests that need a Debian package are skipped by name without it, and fail under CI; the list is in one place."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests import debian

REPOSITORY = Path(__file__).parents[2]


def item(*marks: pytest.Mark, **params: object) -> pytest.Item:
    """A test with these marks and parameters."""
    made = SimpleNamespace(
        iter_markers=lambda name: (mark for mark in marks if mark.name == name), callspec=SimpleNamespace(params=params)
    )
    return cast(pytest.Item, made)


def test_each_listed_package_can_be_recognised_and_no_other_one() -> None:
    assert debian.listed() == sorted(debian.PROBES)
    assert set(debian.MOONCAKE) <= set(debian.PROBES)


def test_each_package_that_a_test_names_is_listed() -> None:
    named = {
        name
        for path in (REPOSITORY / "tests").rglob("*.py")
        for call in re.findall(r"mark\.debian\(([^)*]*)\)", path.read_text())
        for name in re.findall(r'"([^"]+)"', call)
    }
    assert named and named <= set(debian.listed())


@pytest.mark.parametrize("place", [".ci/run", ".github/workflows/ci.yml", "CONTRIBUTING.md", "README.md"])
def test_no_other_place_lists_them(place: str) -> None:
    text = (REPOSITORY / place).read_text()
    assert [name for name in debian.listed() if re.search(rf"(?<![\w-]){name}(?![\w-])", text) and name != "curl"] == []


def test_a_test_needs_what_it_names_and_what_its_relay_links() -> None:
    assert debian.needed(item()) == set()
    assert debian.needed(item(pytest.mark.debian("curl", "chromium").mark, relay="shm")) == {"curl", "chromium"}
    assert debian.needed(item(name="mooncake", nbytes=3)) == set(debian.MOONCAKE)


def test_a_missing_package_skips_a_test_with_a_line_to_install_it_or_fails_ci() -> None:
    here = {"curl": lambda: None, "chromium": lambda: None, "iproute2": lambda: True}
    needs = item(pytest.mark.debian("iproute2", "curl", "chromium").mark)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium curl "):
        debian.require(needs, ci=False, probes=here)
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium curl "):
        debian.require(needs, ci=True, probes=here)
    debian.require(item(pytest.mark.debian("iproute2").mark), ci=True, probes=here)
