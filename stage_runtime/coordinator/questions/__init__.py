"""Questions to every process of the pipeline: profiles, clocks, operations of engines."""
