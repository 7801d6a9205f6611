"""Payloads under way: whatever becomes of one, its request learns of it. Real fetching over a relay in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stage_runtime.errors import TransferError
from stage_runtime.transfers.receiving import Fetched, Fetching
from stage_runtime.wire.parts import Body


class Operation:
    """`relays.base.RelayOperation` of a payload that is here now, or comes later."""

    def __init__(self, *, later: bool, error: Exception | None) -> None:
        self._later = later
        self._error = error
        self.cleaned: list[str] = []

    def done(self) -> bool:
        return not self._later

    def take(self) -> memoryview:
        return self._came()

    def take_device(self) -> None:
        return None

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        await asyncio.sleep(0)
        return self._came()

    def _came(self) -> memoryview:
        if self._error is not None:
            raise self._error
        return memoryview(b"bytes")


class Relays:
    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def get(self, metadata: bytes, *, request_id: str, peer: str, holder: str = "") -> Operation:
        return self._operation

    def decline(self, metadata: bytes, *, peer: str) -> None: ...

    def cleanup(self, request_id: str) -> None:
        self._operation.cleaned.append(request_id)


async def fetched(operation: Operation, then: Any) -> list[Exception]:
    """The failures that the request received."""
    failures: list[Exception] = []
    fetching = Fetching(Relays(operation), asyncio.get_running_loop())  # type: ignore[arg-type]
    fetching.fetch("peer", Body(transfer=b"here"), "r#1", then, failures.append)
    for _ in range(5):
        await asyncio.sleep(0)
    fetching.close()
    return failures


def raises(got: Fetched) -> None:
    raise KeyError("on purpose")


@pytest.mark.parametrize("later", [False, True], ids=["here", "comes later"])
async def test_a_transfer_that_fails_fails_its_request(later: bool) -> None:
    error = TransferError("gone")
    assert await fetched(Operation(later=later, error=error), lambda got: None) == [error]


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError(), KeyError("x")], ids=repr)
async def test_a_payload_that_comes_late_and_finds_no_memory_fails_its_request(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A payload that is here at once is another case: there the loop over messages tells the request."""
    operation = Operation(later=True, error=error)
    assert await fetched(operation, lambda got: None) == [error]
    assert operation.cleaned == ["r#1"]
    assert "a value of request r#1 could not be fetched" in caplog.text


async def test_a_payload_that_came_late_and_could_not_be_dealt_with_fails_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (error,) = await fetched(Operation(later=True, error=None), raises)
    assert isinstance(error, KeyError)
    assert "handling a transfer of request r#1 failed" in caplog.text


async def test_a_payload_that_is_here_and_cannot_be_dealt_with_raises_to_the_link_which_ends_its_request() -> None:
    with pytest.raises(KeyError):
        await fetched(Operation(later=False, error=None), raises)
