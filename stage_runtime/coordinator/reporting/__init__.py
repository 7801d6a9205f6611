"""The view of requests in `/status`, `/metrics`, traces and profiles."""
