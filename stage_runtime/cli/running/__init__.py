"""Commands to a pipeline that runs, and how they find it."""
