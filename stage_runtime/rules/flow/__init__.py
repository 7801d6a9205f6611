"""Messages, streams and inputs between stages: their order, and how many may be under way."""
