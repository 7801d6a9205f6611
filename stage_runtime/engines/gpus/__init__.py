"""A stage's GPU: the current device of each thread, and the memory it may take."""
