"""The pods of units and of the coordinator: probes, volumes, devices, affinity, security."""
