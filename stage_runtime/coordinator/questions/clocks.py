"""How far the clocks of processes are from the coordinator's, so that times of several machines make one picture.

Pure but for the monotonic clock. Measured by `profile_runs` with a message and its answer, on joining and every now and
then. Source of the formula: RFC 5905, section 8.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

OLD_S: Final = 600.0  # a measurement of this age gives way to a less certain one: clocks drift
KEPT: Final = 10_000  # instances; records of requests outlive those that served them


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """The distance of one process's clock, in nanoseconds."""

    offset_ns: int  #: Nanoseconds to be added to the process's times; 0 when the way there and back can explain it.
    uncertainty_ns: int
    measured_at: float  #: Monotonic.


class Clocks:
    """The clocks of all processes that this coordinator has met."""

    def __init__(self) -> None:
        #: instance -> to be added to its times, in microseconds. Records of requests hold this very mapping.
        self.offsets_us: dict[str, int] = {}
        self._known: dict[str, Distance] = {}

    def measured(
        self, instance: str, *, sent_ns: int, there_received_ns: int, there_sent_ns: int, received_ns: int
    ) -> Distance | None:
        """Take a measurement: when the question left and arrived, when the answer left and arrived.

        None: the ways took less than no time, so a clock was set meanwhile, or runs at another rate: it does not count.
        """
        both_ways_ns = (received_ns - sent_ns) - (there_sent_ns - there_received_ns)
        if both_ways_ns < 0:
            return None
        offset = ((sent_ns - there_received_ns) + (received_ns - there_sent_ns)) // 2
        uncertainty = max(both_ways_ns // 2, 1)
        distance = Distance(
            offset_ns=0 if abs(offset) <= uncertainty else offset,
            uncertainty_ns=uncertainty,
            measured_at=time.monotonic(),
        )
        known = self._known.get(instance)
        if known is None or uncertainty <= known.uncertainty_ns or distance.measured_at - known.measured_at > OLD_S:
            self._known[instance] = distance
            self.offsets_us[instance] = distance.offset_ns // 1000
            if len(self._known) > KEPT:
                oldest = next(iter(self._known))
                del self._known[oldest], self.offsets_us[oldest]
        return distance
