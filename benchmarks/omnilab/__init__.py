"""Parts of `benchmarks.omni`."""
