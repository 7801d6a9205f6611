"""The timer slack of threads: taken over from the thread that starts them, and only meanwhile."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from stage_runtime.sockets.endpoints import opening, timers


def in_a_new_thread() -> float:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(timers.current_s).result()


def test_a_thread_that_is_started_meanwhile_keeps_the_slack_and_the_starting_one_does_not() -> None:
    before = timers.current_s()
    with timers.slack(0.02):
        assert timers.current_s() == in_a_new_thread() == 0.02
    assert timers.current_s() == in_a_new_thread() == before


async def test_opening_sockets_leaves_the_slack_of_the_loop_s_thread() -> None:
    before = timers.current_s()
    assert before < opening.TIMER_SLACK_S
    sockets = opening.Sockets(
        asyncio.get_running_loop(),
        security=None,
        dead_after_s=3.0,
        handshake_failed=lambda why: None,
        short_connection=lambda: None,
    )
    sockets.close()
    assert timers.current_s() == before
