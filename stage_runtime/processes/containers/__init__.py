"""Processes that only containers of a cluster have: PID 1, its probes, its termination message."""
