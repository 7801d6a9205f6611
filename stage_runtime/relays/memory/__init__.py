"""Memory that relays read and write: the arena, its slots and pages, those of peers, and locked memory."""
