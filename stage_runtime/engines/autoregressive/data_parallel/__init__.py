"""Several engines inside one instance: their coordinator, and what an engine does beyond one that is alone.

The rules are in `rules.autoregressive.waves` and `.balancing`; the client is in `clients.data_parallel`.
"""
