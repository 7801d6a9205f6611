"""Keys and values that one engine hands to another."""
