"""A pipeline read for this machine and checked, before anything starts."""
