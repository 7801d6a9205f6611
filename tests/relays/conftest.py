"""Two ends of one relay in two processes: ``far`` and ``near``. The test module names the relay as ``RELAY``."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.relays.near_end import Near
from tests.relays.relay_pairs import FarEnd


@pytest.fixture
def far(request: pytest.FixtureRequest) -> Iterator[FarEnd]:
    end = FarEnd(relay=request.module.RELAY)
    yield end
    end.process.send_signal(signal.SIGCONT)
    end.close()


@pytest.fixture
async def near(far: FarEnd, request: pytest.FixtureRequest) -> AsyncIterator[Near]:
    end = Near(far, request.module.RELAY)
    yield end
    end.relays.close()
