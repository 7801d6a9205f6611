"""Which instances serve a request: bindings, waiting for a free instance, instances that are avoided."""
