"""Keeping processes running: children, instances of process groups, a supervisor of several. It serves `omni up` and
pods.
"""
