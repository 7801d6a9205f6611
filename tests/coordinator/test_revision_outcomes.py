"""A coordinator counts ended attempts for each revision, and says since when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnipipeline_spec.types.plan import CanaryShare
from stage_runtime.metrics import catalog
from tests.coordinator.manager_kit import REVISION, CoordinatorHarness, coordinator_harness, error_of, new_request, read

NEW = msgspec.structs.replace(REVISION, revision="rev2", units={"front": "f2", "voice": "v1"})
TRIED = CanaryShare(revision="rev2", weight=0.5)


def counts(made: CoordinatorHarness) -> dict[str, tuple[int, int]]:
    found: dict[str, Any] = made.manager.status()["outcomes"]
    return {revision: (one["completed"], one["failed"]) for revision, one in found.items()}


async def ask(made: CoordinatorHarness, name: str, code: str | None = None) -> str:
    """One request, and the revision that had it. code: it fails so; None: it completes."""
    handle = made.manager.admit(new_request(name))
    revision = handle.revision
    sent = made.submitted({"rev1": "f1", "rev2": "f2"}[revision])[-1]
    if code is None:
        made.complete(sent, "shout")
        made.complete(sent, "write")
        await read(handle)
    else:
        made.fail(sent, "shout", code)
        await error_of(handle)
    return revision


async def test_attempts_count_for_their_revision_since_one_is_tried() -> None:
    async with coordinator_harness(revisions=(REVISION, NEW), terminal_stages=None) as made:
        made.join("f2", "front", revision="f2")
        await ask(made, "before")
        assert counts(made) == {}, "none is tried"
        made.coordinator.share_requests(TRIED)
        assert counts(made) == {"rev1": (0, 0), "rev2": (0, 0)}
        served = [await ask(made, f"good{number}") for number in range(4)]
        assert sorted(served) == ["rev1", "rev1", "rev2", "rev2"]
        assert counts(made) == {"rev1": (2, 0), "rev2": (2, 0)}
        made.coordinator.share_requests(msgspec.structs.replace(TRIED, weight=0.9))
        assert counts(made) == {"rev1": (2, 0), "rev2": (2, 0)}, "another share of the same revision"
        made.coordinator.update_revisions([REVISION])
        assert counts(made) == {"rev1": (2, 0)}
        metrics = made.manager.metrics()
        assert metrics[catalog.REVISION_REQUESTS] == {("rev1", "completed"): 3}
        assert list(metrics[catalog.REVISION_TIME]) == [("rev1",)]
        made.coordinator.share_requests(None)
        assert counts(made) == {}


@pytest.mark.parametrize(
    ("code", "failed"),
    [("stage_failed", 1), ("transport_failed", 1), ("invalid_request", 0), ("too_large", 0)],
)
async def test_only_faults_of_the_pipeline_count(code: str, failed: int) -> None:
    async with coordinator_harness(retries=0) as made:
        made.coordinator.share_requests(TRIED)
        await ask(made, "one", code)
        assert counts(made) == {"rev1": (0, failed)}


async def test_an_attempt_counts_once_and_that_it_is_sent_again_hides_nothing() -> None:
    async with coordinator_harness(revisions=(REVISION, NEW), retries=1) as made:
        made.join("f2", "front", revision="f2")
        made.coordinator.share_requests(msgspec.structs.replace(TRIED, weight=1.0))
        handle = made.manager.admit(new_request())
        assert handle.revision == "rev2"
        made.coordinator.lost("f2")
        sent = made.submitted("f1")[-1]
        made.complete(sent, "shout")
        made.complete(sent, "write")
        await read(handle)
        assert counts(made) == {"rev1": (1, 0), "rev2": (0, 1)}


async def test_a_request_that_its_client_ends_tells_nothing() -> None:
    async with coordinator_harness() as made:
        made.coordinator.share_requests(TRIED)
        made.manager.admit(new_request())
        assert made.manager.abort("r1", "gone")
        assert counts(made) == {"rev1": (0, 0)}
