"""What should exist: a plan becomes Kubernetes objects as plain dicts. Pure: no clock, no cluster, no randomness."""
