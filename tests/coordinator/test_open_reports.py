"""`/status` and `/metrics`, which need no key in a pod, and `/readyz`, which balancers follow."""

from __future__ import annotations

import msgspec

from stage_runtime.metrics import exposition
from tests.coordinator.manager_kit import coordinator_harness, new_request

SECRETS = ("a-client-s-id", "a client's text", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


async def test_neither_status_nor_metrics_hold_an_id_or_a_text_of_a_request() -> None:
    async with coordinator_harness() as made:
        request = msgspec.structs.replace(new_request(inputs={"text": SECRETS[1]}), id=SECRETS[0])
        made.manager.admit(request, trace=SECRETS[2])
        assert made.manager.status()["in_flight"] == 1
        shown = repr(made.manager.status()) + exposition.render(made.manager.metrics())
        assert not [one for one in SECRETS if one in shown]


async def test_a_draining_coordinator_is_not_ready_and_admits_what_comes() -> None:
    async with coordinator_harness() as made:
        assert made.manager.ready()
        made.manager.drain()
        assert not made.manager.ready()
        made.manager.admit(new_request())
        assert made.manager.in_flight == 1
