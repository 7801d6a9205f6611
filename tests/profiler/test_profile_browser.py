"""The page in a real browser: Debian's Chromium draws it from disk without an error.

Missing Chromium is a failure under CI and a skip elsewhere.
"""

from __future__ import annotations

import re
import subprocess
import zlib
from pathlib import Path

import pytest

from stage_runtime.profiler import event_files
from stage_runtime.profiler.formats import html
from tests import debian
from tests.profiler.event_files import chain, line, write

pytestmark = [pytest.mark.browser, pytest.mark.debian("chromium"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def chromium() -> str:
    found = debian.program("chromium")
    assert found is not None
    return found


@pytest.fixture
def page(tmp_path: Path) -> Path:
    for number in range(30):
        events = chain(f"request-<b>{number}", ["thinker", "talker"], 3, start=number * 5_000_000)
        write(tmp_path / "run" / f"{number}.jsonl", *(event for _, event in events))
    file = tmp_path / "page.html"
    file.write_text(html.page(event_files.read(tmp_path / "run")))
    return file


def _chromium(program: str, page: Path, *arguments: str) -> str:
    """Its standard output. The folder of its profile is the test's own."""
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={page.parent / 'chromium'}",
        "--window-size=1300,1700",
        "--virtual-time-budget=10000",
        *arguments,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_page_draws_requests_waterfall_and_tables(chromium: str, page: Path) -> None:
    drawn = _chromium(chromium, page, "--dump-dom")
    assert 'data-ready="yes"' in drawn  # the script came to its end
    assert drawn.count('class="row') == 30
    waterfall = re.search(r'<svg id="waterfall".*?</svg>', drawn, re.DOTALL)
    assert waterfall is not None
    assert waterfall[0].count("<g>") == 7  # 2 stages, 5 hops
    assert "thinker ⇢ talker" in waterfall[0] and "stage_" not in waterfall[0]
    assert "Waterfall of request-&lt;b&gt;" in drawn
    assert drawn.count("<tr>") > 10


def test_a_long_name_of_a_stage_does_not_lie_over_its_bars(chromium: str, tmp_path: Path) -> None:
    name = "s" * 200
    write(tmp_path / "run" / "events.jsonl", *(event for _, event in chain("r", [name], 3)))
    page = tmp_path / "page.html"
    page.write_text(html.page(event_files.read(tmp_path / "run")))
    drawn = _chromium(chromium, page, "--dump-dom")
    utilisation = re.search(r'<svg id="utilisation".*?</svg>', drawn, re.DOTALL)
    assert utilisation is not None
    texts = re.findall(r"<text [^>]*>([^<]*)", utilisation[0])
    assert f"<title>{name}</title>" in utilisation[0]
    assert any(text.startswith("sss") and text.endswith("…") and len(text) < 100 for text in texts)
    assert name not in texts


@pytest.mark.long
def test_the_page_of_a_request_with_very_many_events_is_drawn_to_its_end(chromium: str, tmp_path: Path) -> None:
    """More than a call of a function takes arguments: about 120,000."""
    events = chain("many", ["thinker", "talker"], 40_000)
    tried = [
        line("many", "thinker", name, number, attempt=number)
        for number in range(1000)
        for name in ("stage_input_received", "stage_complete")
    ]
    runs = [
        line("many", "thinker", name, number, attempt=number)
        for number in range(15_000)
        for name in ("stage_run_start", "stage_run_end")
    ]
    names = [
        line("many", f"stage {number}", f"step{number}_{half}", number)
        for number in range(3000)
        for half in ("start", "end")
    ]
    write(tmp_path / "run" / "events.jsonl", *(event for _, event in events), *tried, *runs, *names)
    page = tmp_path / "page.html"
    page.write_text(html.page(event_files.read(tmp_path / "run")))
    drawn = _chromium(chromium, page, "--dump-dom")
    assert 'data-ready="yes"' in drawn
    assert drawn.count("<rect") < 1000
    assert drawn.count("<i style=") < 1000
    assert drawn.count("<tr>") < 1100
    assert "more are not drawn" in drawn and "more rows are not drawn" in drawn


def test_its_picture_is_not_blank(chromium: str, page: Path) -> None:
    picture = page.parent / "page.png"
    _chromium(chromium, page, f"--screenshot={picture}")
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = b"".join(
        data[start + 4 : start + 4 + int.from_bytes(data[start - 4 : start])]
        for start in (found.start() for found in re.finditer(rb"IDAT", data))
    )
    assert len(set(zlib.decompress(pixels))) > 50
