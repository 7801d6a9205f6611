"""The instances that serve a request: bindings, waiting for a free instance, instances that are avoided."""
