"""The life of one request: its states, how long it waits, how it fails and what is left of it."""
