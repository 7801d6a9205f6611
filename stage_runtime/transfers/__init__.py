"""Payloads under way: what is sent within credits, what is fetched, what is released."""
