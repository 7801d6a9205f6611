"""Calls of tools: what a request offers, how a model writes them, how they are read. Pure."""
