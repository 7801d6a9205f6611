"""Commands that containers run: one process of a pipeline, or one fetch of a model."""
