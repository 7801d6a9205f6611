"""What the status says of a pipeline. Pure."""
