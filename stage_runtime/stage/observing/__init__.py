"""Observes a running stage: busy time, stalls, idle memory, recorded events."""
