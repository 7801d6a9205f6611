"""``omni trace`` and ``omni top``: what they draw, and against a running pipeline."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from stage_runtime.cli import main
from stage_runtime.cli.running import top, trace
from tests.cli.test_up import PATIENCE_S, base, up
from tests.thoroughness import crossed

__all__ = ["base"]


def omni(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def lines(drawn: RenderableType, width: int = 90) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(drawn)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def record(**changes: Any) -> dict[str, Any]:
    return {
        "id": "req-1",
        "kind": "chat",
        "state": "completed",
        "age_ms": 50.0,
        "attempt": 1,
        "first_event_ms": 7.0,
        "total_ms": 10.0,
        "stages": {
            "b": {"queue_ms": 1.0, "run_ms": 4.0, "start_ms": 5.0, "end_ms": 10.0},
            "a": {"queue_ms": 0.0, "run_ms": 4.0, "start_ms": 0.0, "end_ms": 4.0},
            "old": {"queue_ms": 0.0, "run_ms": 4.0, "start_ms": None, "end_ms": None},
        },
        "hops": [{"source": "a", "target": "b", "kind": "stream", "start_ms": 4.0, "end_ms": 5.0}],
        "error": None,
        **changes,
    }


def test_a_request_is_drawn_as_a_waterfall_in_order_of_time() -> None:
    head, _, scale, first, hop, second, legend = lines(trace.draw(record(), width=81))
    assert head == "req-1  chat  completed  10.00 ms, first output after 7.00 ms"
    assert scale.split() == ["0", "…", "10.00", "ms", "START", "ms", "TOOK", "ms"]
    assert first.split() == ["a", "█" * 20, "0.00", "4.00"]
    assert hop.split() == ["a", "⇢", "b", "─" * 5, "4.00", "1.00"]
    assert second.split() == ["b", "░" * 5 + "█" * 20, "5.00", "5.00"]
    assert first.index("█") + 25 == second.index("░") == hop.index("─") + 5
    assert legend == "queue ░  function █  hop ─"


def test_a_failed_and_an_early_request_say_so() -> None:
    error = {"code": "stage_failed", "message": "ValueError: no", "stage": "b"}
    failed = lines(trace.draw(record(state="failed", attempt=2, error=error), width=80))
    assert failed[0].endswith(", attempt 2")
    assert "stage_failed in b: ValueError: no" in failed
    early = lines(trace.draw(record(state="running", total_ms=None, stages={}, hops=[]), width=80))
    assert early[-1] == "no stage has reported yet"


def sample(at: float, **series: float) -> top.Sample:
    status = {
        "pipeline": "p",
        "in_flight": 3,
        "complete": True,
        "missing_groups": [],
        "stages": ["b", "a"],
        "edges": [["a", "b", "stream"]],
        "instances": [{"stages": ["a", "b"], "ready": True}, {"stages": ["b"], "ready": False}],
    }
    return top.Sample(at=at, status=status, series={tuple(key.split("/")): value for key, value in series.items()})  # type: ignore[misc]


def test_the_graph_is_shown_with_queues_busy_stages_and_rates() -> None:
    before = sample(10.0, **{"stage_run_seconds_count/a": 5, "requests_total/completed": 5})
    now = sample(
        12.0,
        **{
            "stage_run_seconds_count/a": 15,
            "stage_run_seconds_sum/a": 1.0,
            "stage_queue_seconds_sum/a": 0.2,
            "stage_waiting/a": 12,
            "stage_running/a": 2,
            "stage_busy_ratio/a": 0.5,
            "stage_busy_ratio/b": 0.0,
            "requests_total/completed": 15,
            "requests_total/stage_failed": 1,
        },
    )
    head, _, _, first, second = lines(top.draw(before, now, width=120), width=120)
    assert head == "p  3 in flight  5.0 completed/s  0.5 failed/s"
    assert first.split() == ["a", "⇢", "b", "1", "12", "▪" * 10 + "+", "2", "▪▪", "5.0", "20.00", "100.00", "50", "%"]
    assert second.split() == ["b", "→", "client", "1", "0", "0", "0.0", "-", "-", "0", "%"]

    for width in (64, 79, 100):  # numbers are never cut: bars go first
        first = lines(top.draw(before, now, width=width), width=width)[3]
        assert "▪" not in first
        assert first.split()[-8:] == ["1", "12", "2", "5.0", "20.00", "100.00", "50", "%"]


def test_blocks_that_cross_are_shown_of_the_stages_that_have_them() -> None:
    counts = {"loads": 2, "loads_total": 40, "local_total": 3, "local_total.short": 2, "local_total.unbound": 1}
    counts |= {"failed_total": 1, "failed_total.lost": 1, "hidden_bytes_total": 6_000_000, "least_tokens": 32}
    before = sample(10.0, **{"engine_kv_loads_total/a": 30, "engine_kv_received_blocks_total/a": 100})
    moved = {"received_blocks_total": 150, "received_bytes_total": 8e6}
    now = sample(12.0, **{f"engine_kv_{name}/a": value for name, value in {**counts, **moved}.items()})
    found = " ".join(line.strip() for line in lines(top.draw(before, now, width=120), width=120)[5:])
    assert found == (
        "a KV: 0.0 blocks/s (0.0 MB/s) sent, 25.0 blocks/s (4.0 MB/s) received, 75 % of all while prefill computed; "
        "prompts: 2 under way, 40 asked from 32 tokens on, 3 computed here (2 short, 1 unbound), 1 failed (1 lost)"
    )
    leases = {"engine_kv_loads_total": 0, "engine_kv_leases": 2, "engine_kv_leases_renewed_total": 5}
    now = sample(12.0, **{f"{name}/b": value for name, value in leases.items()})
    found = " ".join(line.strip() for line in lines(top.draw(before, now, width=120), width=120)[5:])
    assert found.endswith("0 computed here; leases: 2 held, 5 renewed, 0 expired")
    assert "KV" not in "".join(lines(top.draw(sample(1.0), sample(2.0), width=120), width=120))


def test_a_batch_of_requests_that_run_together_keeps_a_stage_busy_once() -> None:
    """Eight requests that ran for a second each within a second."""
    now = sample(11.0, **{"stage_run_seconds_count/a": 8, "stage_run_seconds_sum/a": 8.0, "stage_busy_ratio/a": 1.0})
    first = lines(top.draw(sample(10.0), now, width=80), width=80)[3]
    assert first.split()[-3:] == ["1000.00", "100", "%"]


WIDE = {
    "stages": ["listen", "language_model_with_a_long_name", "speak"],
    "edges": [
        ["listen", "language_model_with_a_long_name", "normal"],
        ["listen", "speak", "normal"],
        ["language_model_with_a_long_name", "speak", "stream"],
    ],
    "instances": [{"stages": ["listen", "language_model_with_a_long_name", "speak"], "ready": True}],
}


@given(width=st.integers(20, 200), large=st.booleans())
def test_no_column_vanishes_without_a_sign_and_no_number_is_cut(width: int, large: bool) -> None:
    much = 1e5 if large else 1.0
    before, after = sample(10.0), sample(11.0)
    series = {
        ("stage_run_seconds_count", "speak"): much,
        ("stage_run_seconds_sum", "speak"): 123 * much,
        ("stage_queue_seconds_sum", "speak"): 9.87654 * much,
        ("stage_waiting", "speak"): 4096.0,
        ("stage_running", "speak"): 256.0,
        ("stage_busy_ratio", "speak"): 1.0,
    }
    now = msgspec.structs.replace(after, status={**after.status, **WIDE}, series=series)
    drawn = lines(top.draw(before, now, width=width), width=width)
    header = next(line for line in drawn if line.startswith("STAGE"))
    row = next(line for line in drawn if line.startswith("speak"))
    table_and_note = " ".join(drawn[drawn.index(header) :])
    assert [each for each in ("STAGE", "TO", *top.NUMBERS) if each not in table_and_note] == []
    assert all(len(line) <= width for line in drawn)
    shown = [each for each in top.NUMBERS if each in header]
    values = ["1", "4096", "256", "100000" if large else "1.0", "9876.54", "123 s", "100 %"]
    expected = " ".join(value for heading, value in zip(top.NUMBERS, values, strict=True) if heading in shown)
    assert " ".join(row.replace("▪", "").replace("+", "").split()).endswith(expected)
    if width >= 80:
        assert shown == list(top.NUMBERS)
        assert "→" in row


def test_in_a_narrow_terminal_the_numbers_are_whole() -> None:
    long = record(hops=[{"source": "s" * 20, "target": "t" * 20, "kind": "payload", "start_ms": 4.0, "end_ms": 5.0}])
    for width in (32, 60):
        drawn = lines(trace.draw(long, width=width), width=width)
        rows = [line.split() for line in drawn if line.startswith(("a ", "b "))]
        assert [row[-2:] for row in rows] == [["0.00", "4.00"], ["5.00", "5.00"]], drawn


def test_what_a_stage_raised_moves_no_cursor() -> None:
    error = {"code": "stage_failed", "message": "\x1b[2Jgone\r\x07", "stage": "b"}
    assert "\x1b" not in "".join(lines(trace.draw(record(state="failed", error=error), width=80)))


@pytest.mark.long
def test_a_terminal_without_these_characters_gets_others(base: Path) -> None:
    with up(base) as program:
        url = program.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        program.wait_for("curl")
        body = {"model": "hello", "messages": [{"role": "user", "content": "hello big world"}]}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers={"x-request-id": "mine"}, timeout=PATIENCE_S
        )
        assert answer.status_code == 200
        commands = (
            ("trace", "mine"),
            ("top", "--once", "--every", "0.1"),
            ("profile", "run", "--seconds", "0.1"),
        )
        # The poorest encoding with each command, the others with one of them.
        tried = [*(("ascii", command) for command in commands), *crossed(("latin-1", "utf-8"), commands)]
        for encoding, command in tried:
            shown = subprocess.run(
                [sys.executable, "-m", "stage_runtime", *command, "--base-path", str(base)],
                env={**os.environ, "PYTHONIOENCODING": encoding},
                capture_output=True,
            )
            assert (shown.returncode, shown.stderr) == (0, b""), (command, shown.stderr)
            assert shown.stdout.decode(encoding if command[0] != "profile" else "utf-8")
        plain = subprocess.run(
            [sys.executable, "-m", "stage_runtime", "trace", "mine", "--base-path", str(base)],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
        ).stdout
    assert b"split > shout" in plain and b"queue .  function #  hop -" in plain


def test_sources_stand_before_their_targets() -> None:
    edges = [("a", "c", "normal"), ("c", "b", "normal"), ("a", "b", "stream")]
    assert top.ordered(["b", "c", "a"], edges) == ["a", "c", "b"]


def test_a_running_pipeline_is_asked(base: Path) -> None:
    with up(base) as program:
        url = program.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        program.wait_for("curl")
        here = ("--base-path", str(base))
        body = {"model": "hello", "messages": [{"role": "user", "content": "hello big world"}]}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers={"x-request-id": "mine"}, timeout=PATIENCE_S
        )
        assert answer.status_code == 200
        drawn = omni("trace", "mine", *here)
        assert drawn.exit_code == 0, drawn.output
        assert re.search(r"^split → shout +─+ ", drawn.output, re.M)
        assert json.loads(omni("trace", "mine", "--json", "--url", url).output)["state"] == "completed"
        unknown = omni("trace", "other", *here)
        assert unknown.exit_code == 1
        assert unknown.stderr.endswith("no request 'other' is in flight or has finished lately\n")
        shown = omni("top", "--once", "--every", "0.1", *here)
        assert shown.exit_code == 0, shown.output
        rows = [line.split()[0] for line in shown.output.splitlines() if line]
        assert rows == ["hello", "STAGE", "split", "shout"]
        program.program.send_signal(signal.SIGINT)
        program.program.wait(PATIENCE_S)
