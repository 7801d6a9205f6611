"""Speech that a client sends: its buffer, whether somebody speaks, where a turn ends."""
