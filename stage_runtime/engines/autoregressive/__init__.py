"""An engine that generates tokens: continuous batching over a paged KV cache, for any decoder of transformers.

The rules (scheduler, blocks, states) are in `rules.autoregressive`. `core` runs steps, `busy_loop` takes what comes
between them, `model_runner` computes, `output_processor` makes text. `stage` is what a stage's thread runs. Modules
that need torch or transformers are imported when an engine is loaded.
"""
