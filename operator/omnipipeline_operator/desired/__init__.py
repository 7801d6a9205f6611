"""A plan becomes Kubernetes manifests, as plain dicts. Pure: no clock, no cluster, no randomness."""
