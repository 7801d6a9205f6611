"""Makes an engine of a factory's name: resolves it, calls it, checks settings, shows the progress."""
