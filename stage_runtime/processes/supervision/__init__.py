"""Keeping processes running: children, instances of process groups, a supervisor of several. For `omni up` and pods."""
