"""Attention over pages of KV blocks."""
