"""The end of a request: deadlines, aborts, notifications to the instances that served it."""
