"""The next changes of a pipeline: replicas, canaries, gangs. Pure."""
