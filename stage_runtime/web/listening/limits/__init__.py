"""Clients that are too many, idle, half closed or never read: what one connection may cost."""
