"""Addresses, listeners and the sockets of a process: opened, secured, bounded. Knows no peers."""
