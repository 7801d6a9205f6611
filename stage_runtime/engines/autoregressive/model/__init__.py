"""A decoder of transformers over a paged KV cache: models, attention, the runner of one step's batch."""
