"""The site's source folder: the repository's Markdown at the same paths, so that links stand as they are.

A file that a page links to and that is not a page (a YAML file, a picture) is copied beside it. A link to a folder
becomes one to its README, its pipeline or its package's first module. Zensical checks every link and anchor when it
builds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import stage_runtime as omni

PAGES: Final = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "examples/*/*.md",
    "benchmarks/*.md",
    "tests/README.md",
)
#: Destinations of links and images, without titles.
LINK: Final = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
CODE: Final = re.compile(r"^ *```.*?^ *```$|(?<!`)(`+)(?!`)[^\n]+?(?<!`)\1(?!`)", re.MULTILINE | re.DOTALL)
OF_A_FOLDER: Final = ("README.md", "pipeline.yaml", "__init__.py")
REFERENCE: Final = Path("docs/reference.md")


class BrokenLink(Exception):
    """A page links to what is not in the repository."""


def write(root: Path, out: Path) -> list[Path]:
    """Write the source folder of the repository ``root`` to ``out``, anew. Returns the pages, relative to it.

    Raises: BrokenLink: names the page and its link.
    """
    shutil.rmtree(out, ignore_errors=True)
    pages = [page.relative_to(root) for pattern in PAGES for page in sorted(root.glob(pattern))]
    for page in pages:
        place = out / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_with_files(root, page, out))
    (out / REFERENCE).write_text(reference())
    return [*pages, REFERENCE]


def reference() -> str:
    """The page that mkdocstrings fills from docstrings: every public name of `stage_runtime`."""
    lines = ["# Reference of the author's API", "", "`import stage_runtime as omni` gives these names.", ""]
    for name in omni.__all__:
        lines += [f"## omni.{name}", "", f"::: stage_runtime.{name}", ""]
    return "\n".join(lines)


def _with_files(root: Path, page: Path, out: Path) -> str:
    """The page's text. The files that it links to are copied."""
    text = (root / page).read_text()

    def linked(found: re.Match[str]) -> str:
        path, anchor = found["path"], found["anchor"] or ""
        target = (root / page.parent / path).resolve()
        if target.is_dir():
            index = next((name for name in OF_A_FOLDER if (target / name).exists()), None)
            if index is None:
                raise BrokenLink(f"{page}: expected a link to a page or a file, got the folder {path}")
            path, target = f"{path.rstrip('/')}/{index}", target / index
        if not target.exists():
            raise BrokenLink(f"{page}: {path} is not in the repository")
        if target.suffix != ".md":
            copy = out / target.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
        return path + anchor

    return "".join(part if code else LINK.sub(linked, part) for code, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces. True: code, in which nothing is a link."""
    end = 0
    for code in CODE.finditer(text):
        yield False, text[end : code.start()]
        yield True, code.group()
        end = code.end()
    yield False, text[end:]
