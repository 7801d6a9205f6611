"""Connections to peers: accepted, dialed, put to sleep, given up; a link is one of them under `rules.flow.links`."""
