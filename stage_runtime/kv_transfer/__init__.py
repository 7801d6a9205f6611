"""Keys and values of prompts that cross between engines: rooms, identity, connectors. No scheduler, no sockets."""
