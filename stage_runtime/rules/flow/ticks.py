"""Moments that all processes have in common: what they send then comes together, and wakes its receiver once.

A message that comes alone costs its receiver two wake-ups, which take longer than the message itself. So what is in no
hurry, an ack or a beat, is sent at the next tick of the wall clock. Clocks of several machines differ by less than a
tick. Pure: the caller passes the time.
"""

from __future__ import annotations

from typing import Final

#: Ticks in the time between two beats: members beat at different ones, so that no tick has all of them.
BEAT_TICKS: Final = 32


def delay_s(now: float, least_s: float, tick_s: float) -> float:
    """Seconds from ``now``, on the wall clock, to the first tick that is at least ``least_s`` away."""
    return least_s + -(now + least_s) % tick_s


def next_s(now: float, tick_s: float) -> float:
    """Seconds from ``now`` to the next tick; one that is nearer than half of ``tick_s`` is passed over.

    A timer that is late or early by a little fires once a tick, and those of a process fire together: one wake-up.
    """
    return delay_s(now, tick_s / 2, tick_s)
