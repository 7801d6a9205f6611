"""Reads the status of coordinators: ``GET :8081/status`` of their pods.

Here: the request, with a short timeout, and the fields that are used. Not here: deciding anything. Called by
`controller`. A coordinator that does not answer (a NetworkPolicy, another network) blocks no roll; only the first
request to its address waits for the whole timeout. The pods are a tenant's, and may answer anything: redirects are not
followed, and an answer beyond the bounds below does not count.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from types import TracebackType
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from omnipipeline_operator.changes.deciding.canary import Attempts
from omnipipeline_spec.scaling import Load
from omnipipeline_spec.types.pods import PROBE_PORT

TIMEOUT_S: Final = 1.0
UNANSWERED_TIMEOUT_S: Final = 0.1  # for an address that has never answered
MAX_BODY_BYTES: Final = 16 << 20  # 3,000 instances with 5 KiB of gauges each
MAX_INSTANCES: Final = 10_000
MAX_TIMES: Final = 1000  # different times of one revision's attempts
READ_AT_ONCE: Final = 4  # bodies of one pipeline's coordinators, so that together they are bounded, too
#: Also text that is not UTF-8, and lists in lists beyond Python's limit.
MISREAD: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MAX_ADDRESSES: Final = 2000  # remembered; above it, the least recently asked address is forgotten


T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered instance of a process group."""

    unit: _Text
    revision: _Text
    endpoint: _Text
    group: _Text = ""
    ready: bool = False
    draining: bool = False
    aside: bool = False
    bound: _Count = 0
    waiting: _Count = 0
    running: _Count = 0

    @property
    def host(self) -> str:
        """The IP address of its pod; empty when the endpoint has none."""
        try:
            host = urlsplit(self.endpoint).hostname or ""
            # An IPv6 address may have a zone, which is any text: the host becomes a part of a field selector.
            return "" if getattr(ipaddress.ip_address(host), "scope_id", None) else host
        except ValueError:
            return ""

    @property
    def eligible(self) -> bool:
        return self.ready and not self.draining and not self.aside

    @property
    def load(self) -> int:
        return self.bound + self.waiting + self.running


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`omnipipeline_spec.scaling.Load`, as a coordinator may report it."""

    ready: _Count = 0
    pending: _Count = 0
    arrivals_per_s: _Number | None = None
    service_s: _Number | None = None
    running: _Number = 0.0
    waiting: _Number = 0.0
    held: _Number = 0.0
    per_instance: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.0

    @property
    def load(self) -> Load:
        return Load(**msgspec.structs.asdict(self))


class RevisionOutcomes(msgspec.Struct, frozen=True, kw_only=True):
    """The ended attempts of one revision since a new one is tried, as a coordinator may report them."""

    completed: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    failed: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    times: Annotated[tuple[tuple[_Number, _Count], ...], msgspec.Meta(max_length=MAX_TIMES)] = ()

    @property
    def attempts(self) -> Attempts:
        return Attempts(completed=self.completed, failed=self.failed, times=dict(self.times))


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one coordinator."""

    revisions: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_INSTANCES)] = ()
    instances: Annotated[tuple[InstanceStatus, ...], msgspec.Meta(max_length=MAX_INSTANCES)] = ()

    groups: Annotated[dict[_Text, GroupLoad], msgspec.Meta(max_length=MAX_INSTANCES)] = {}
    outcomes: Annotated[dict[_Text, RevisionOutcomes], msgspec.Meta(max_length=MAX_INSTANCES)] = {}

    def registered(self) -> dict[tuple[str, str], int]:
        """(unit, revision) -> pods that requests can be bound to."""
        hosts = {(each.unit, each.revision, each.host) for each in self.instances if each.eligible}
        counts: dict[tuple[str, str], int] = {}
        for unit, revision, _ in hosts:
            counts[unit, revision] = counts.get((unit, revision), 0) + 1
        return counts

    def attempts(self) -> dict[str, Attempts]:
        """Pipeline revision -> its ended attempts."""
        return {revision: each.attempts for revision, each in self.outcomes.items()}

    def loads(self) -> dict[str, int]:
        """Address of a pod -> requests bound, waiting and running there."""
        found: dict[str, int] = {}
        for each in self.instances:
            found[each.host] = found.get(each.host, 0) + each.load
        return found


class FetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a prefetch Job's pod says that it is."""

    bytes_done: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
    bytes_total: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class StatusClient:
    """Reads the status of coordinators, and of prefetch Jobs, over HTTP."""

    def __init__(self, *, port: int = PROBE_PORT) -> None:
        self._port = port
        # A compressed body is not read as such: a few bytes could be gigabytes.
        self._session = aiohttp.ClientSession(auto_decompress=False, headers={"Accept-Encoding": "identity"})
        self._has_answered: dict[str, bool] = {}  #: Address -> whether it has ever answered.

    async def __aenter__(self) -> StatusClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, addresses: Iterable[str]) -> list[CoordinatorStatus]:
        """The statuses of all coordinators that answer."""
        reading = asyncio.Semaphore(READ_AT_ONCE)
        answers = await asyncio.gather(*(self._one(address, reading, CoordinatorStatus) for address in addresses))
        return [each for each in answers if each is not None]

    async def fetch(self, address: str) -> FetchStatus | None:
        """The status of the pod of a prefetch Job; None: it does not answer, as one of an earlier version."""
        return await self._one(address, asyncio.Semaphore(1), FetchStatus)

    def timeout_s(self, address: str) -> float:
        """How long a request to this address may take."""
        return TIMEOUT_S if self._has_answered.get(address, True) else UNANSWERED_TIMEOUT_S

    async def _one(self, address: str, reading: asyncio.Semaphore, form: type[T]) -> T | None:
        status = await self._ask(address, self.timeout_s(address), reading, form)
        self._has_answered[address] = self._has_answered.pop(address, False) or status is not None
        if len(self._has_answered) > MAX_ADDRESSES:
            del self._has_answered[next(iter(self._has_answered))]
        return status

    async def _ask(self, address: str, timeout_s: float, reading: asyncio.Semaphore, form: type[T]) -> T | None:
        host = f"[{address}]" if ":" in address else address
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(f"http://{host}:{self._port}/status", allow_redirects=False) as answer,
                reading,
            ):
                if answer.status != 200:
                    return None
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        return None
                return msgspec.json.decode(body, type=form)
        except (aiohttp.ClientError, OSError, TimeoutError, *MISREAD):
            return None
