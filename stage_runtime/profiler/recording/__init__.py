"""What a process records of its requests, and where it writes that."""
