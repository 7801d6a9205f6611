"""Pure rules of the autoregressive engine: states of its requests, blocks of its KV cache, the scheduler."""
