"""The documentation as a site: it builds without a warning, and a link without a target is an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import stage_runtime as omni
from docs.site import sources
from tests.docs.blocks import ROOT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a page and a picture."""
    made = tmp_path / "root"
    (made / "docs").mkdir(parents=True)
    (made / "docs/picture.svg").write_text("<svg/>")
    (made / "examples").mkdir()
    (made / "examples/pipeline.yaml").write_text("kind: OmniPipeline")
    return made


def pages(nav: Any) -> Iterator[str]:
    """The pages of mkdocs.yml's ``nav``, which nests lists and mappings."""
    match nav:
        case str():
            yield nav
        case list():
            for each in nav:
                yield from pages(each)
        case dict():
            yield from pages([*nav.values()])


def test_every_page_of_the_site_has_one_place_in_its_navigation(tmp_path: Path) -> None:
    listed = sorted(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert listed == sorted(page.as_posix() for page in sources.write(ROOT, tmp_path / "out"))


@pytest.mark.nightly  # links, anchors and pages each time: test_tables.py and the tests here
def test_the_site_builds_with_all_links_and_the_whole_reference() -> None:
    run = subprocess.run([sys.executable, "-m", "docs.site"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    page = (ROOT / "build/site/docs/reference.html").read_text()
    assert all(f'id="omni{name.lower()}"' in page for name in omni.__all__)


def test_a_file_or_a_folder_that_a_page_links_to_is_copied(root: Path, tmp_path: Path) -> None:
    (root / "README.md").write_text("![a picture](docs/picture.svg) and [an example](examples/), `[no](link)`\n")
    assert sources.write(root, tmp_path / "out") == [Path("README.md"), sources.REFERENCE]
    assert (tmp_path / "out/docs/picture.svg").exists() and (tmp_path / "out/examples/pipeline.yaml").exists()
    text = (tmp_path / "out/README.md").read_text()
    assert text == "![a picture](docs/picture.svg) and [an example](examples/pipeline.yaml), `[no](link)`\n"


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("docs/other.svg", "README.md: docs/other.svg is not in the repository"),
        ("docs", "README.md: expected a link to a page or a file, got the folder docs"),
    ],
)
def test_a_link_without_a_target_names_its_page(link: str, why: str, root: Path, tmp_path: Path) -> None:
    (root / "README.md").write_text(f"[there]({link})\n")
    with pytest.raises(sources.BrokenLink) as raised:
        sources.write(root, tmp_path / "out")
    assert str(raised.value) == why
