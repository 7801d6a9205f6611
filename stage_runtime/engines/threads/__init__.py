"""The threads and loops that run authors' functions: blocked, failed, or left behind at the end."""
