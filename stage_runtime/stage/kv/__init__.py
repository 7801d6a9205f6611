"""Rooms of one stage for KV transfer: what it sends, and which room is open to whom."""
