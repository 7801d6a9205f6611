"""The check of deadlines goes on whatever one request's deadline does."""

from __future__ import annotations

import asyncio

from stage_runtime.coordinator.ending.deadlines import Deadlines


async def test_a_deadline_whose_end_raises_does_not_stop_the_later_ones() -> None:
    loop, passed, over = asyncio.get_running_loop(), [], asyncio.Event()
    raised: list[str] = []
    loop.set_exception_handler(lambda _, context: raised.append(str(context["exception"])))

    def end(request_id: str, deadline: float) -> None:
        passed.append(request_id)
        if request_id == "odd":
            raise RuntimeError("odd")
        over.set()

    deadlines = Deadlines(loop, passed=end, wanted=lambda *_: True)
    deadlines.add("odd", loop.time())
    deadlines.add("next", loop.time() + 0.001)
    async with asyncio.timeout(30):
        await over.wait()
    deadlines.close()
    assert (passed, raised) == (["odd", "next"], ["odd"])
