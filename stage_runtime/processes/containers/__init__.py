"""What only containers of a cluster have: PID 1, probes for the kubelet, termination messages."""
