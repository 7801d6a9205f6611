"""The revision that serves: the plan and its pins, its history, the one that is tried."""
