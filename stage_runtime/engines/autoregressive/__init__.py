"""An engine that generates tokens: continuous batching over a paged KV cache, for any decoder of transformers.

The rules (scheduler, blocks, states) are in `rules.autoregressive`. Rooms, highest first: `stage`, `clients` and
`external`, `data_parallel`, `process`, `loading`, `core`, `kernels` and `tensor_parallel`, `model`, `sampling`, `text`.
Modules that need torch or transformers are imported when an engine is loaded.
"""
