"""Chats, completions and responses: bodies to requests, events to answers. Pure."""
