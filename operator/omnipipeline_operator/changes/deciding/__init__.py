"""What should change now: replicas, canaries, gangs. Pure."""
