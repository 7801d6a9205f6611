"""What `/status`, `/metrics`, traces and profiles show of requests."""
