"""The output of processes is kept for `omni logs`, up to a bound; a whole pipeline is run and asked in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import stage_runtime as omni
from stage_runtime.cli.running import logs
from stage_runtime.errors import RequestError
from stage_runtime.processes.one_machine.kept_output import KeptOutput, Reader

HELLO = Path(__file__).parents[2] / "examples/hello/pipeline.yaml"


def test_lines_are_kept_and_followed_also_into_a_new_file(tmp_path: Path) -> None:
    kept, reader = KeptOutput(tmp_path, most=100), Reader(tmp_path)
    kept.add("a", "one\ttwo")
    assert list(reader.all()) == [("a", "one\ttwo")]
    found = []
    for number in range(20):
        kept.add("b.1", f"line {number}")
        found += list(reader.new())
    assert found == [("b.1", f"line {number}") for number in range(20)]
    second = Reader(tmp_path)
    later = list(second.all())
    second.close()
    assert 5 < len(later) < 20 and later == found[-len(later) :]
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 300
    kept.close()
    kept.add("a", "nothing")
    reader.close()


def test_a_run_shows_its_lines_and_is_asked_in_a_test() -> None:
    """One start of examples/hello for all of it."""
    testing: Any = omni.testing
    with testing.run_pipeline(HELLO) as running:
        answer = running.chat("hello there")
        assert "HELLO" in answer.text and answer.finish == "stop"
        assert running.chat([{"role": "user", "content": "one"}]).text
        assert list(running.ask({"text": "a b"})) == ["shout"]
        with pytest.raises(RequestError, match="messages"):
            running.chat([])
        whole = CliRunner().invoke(logs.command, ["--pipeline", "hello"])
        assert whole.exit_code == 0, whole.output
        lines = whole.output.splitlines()
        assert any(line.startswith("coordinator | ") for line in lines)
        some = CliRunner().invoke(logs.command, ["--pipeline", "hello", "--tail", "1", "coordinator"])
        assert len(some.output.splitlines()) == 1 and some.output.startswith("coordinator | ")
        assert set(lines) <= set(running.logs)
    assert CliRunner().invoke(logs.command, ["--pipeline", "hello"]).exit_code == 1
