"""tests/README.md: made from the marks of the tests; every promise of docs/architecture.md is proven by one."""

from __future__ import annotations

import re
from pathlib import Path

from tests import index
from tests.cluster_parts import modules, paths, shares
from tests.docs.blocks import ROOT


def test_the_index_is_what_the_marks_of_the_tests_say() -> None:
    assert index.PAGE.read_text() == index.page()


def test_every_promise_is_proven_by_a_test_and_no_test_proves_another() -> None:
    assert set(index.proofs(index.tests())) == set(index.promises())
    assert len(index.promises()) == len(set(index.promises())) > 90


def test_every_test_that_a_page_names_exists() -> None:
    named = {name for page in (ROOT / "docs").glob("*.md") for name in re.findall(r"`(test_\w+)`", page.read_text())}
    existing = {each.name for each in index.tests()} | {each.path.stem for each in index.tests()}
    assert named - existing == set()


def test_marks_of_a_class_a_module_and_a_row_are_those_of_the_test(tmp_path: Path) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    source = """
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(9)]

class TestAll:
    @pytest.mark.proves("one", "two")
    @pytest.mark.parametrize("row", [1, pytest.param(2, marks=pytest.mark.nightly)])
    def test_it(self, row): ...
"""
    (folder / "test_room.py").write_text(source)
    [found] = index.tests(tmp_path)
    assert (found.path, found.name) == (Path("room/test_room.py"), "test_it")
    assert {("cluster", ""), ("proves", "one"), ("proves", "two"), ("nightly", "")} <= found.marks


def test_every_module_that_needs_an_api_server_alone_is_in_one_share() -> None:
    marked = {ROOT / "tests" / each.path for each in index.tests() if ("cluster", "") in each.marks}
    alone = {each for each in marked if each.parent.name != "cluster"}
    divided = [each for share in shares(modules(), 3) for each in share]
    assert alone <= set(divided) and len(divided) == len(set(divided))


def test_every_module_with_a_test_for_the_cluster_is_run_and_no_folder_but_that_of_pods() -> None:
    marked = {ROOT / "tests" / each.path for each in index.tests() if ("cluster", "") in each.marks}
    assert len(marked) > 40
    assert [each for each in marked if not {each, each.parent} & set(paths())] == []
    assert [each for each in paths() if each.is_dir()] == [ROOT / "tests" / "cluster"]
