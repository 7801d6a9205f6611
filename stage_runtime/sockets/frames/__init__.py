"""Frames of connected peers: read, paced, classified, acknowledged, sent again."""
