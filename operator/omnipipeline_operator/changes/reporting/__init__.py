"""The status of a pipeline, from what is known of it. Pure."""
