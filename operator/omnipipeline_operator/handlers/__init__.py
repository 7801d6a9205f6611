"""What kopf calls, and what runs around it: lifecycle, watches, probes, metrics. Reconciling is in `controller`."""
