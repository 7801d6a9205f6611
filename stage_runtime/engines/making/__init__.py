"""From a factory's name to an engine: resolve, call, check the settings, show the progress."""
