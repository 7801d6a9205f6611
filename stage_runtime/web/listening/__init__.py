"""Connections of HTTP clients and the server that accepts them. Knows no routes."""
