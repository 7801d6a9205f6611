"""`omni.Autoregressive` as the engine of a stage: made by `factory`, in the stage's thread or in its own processes.

Here: prompts in, answers out (`answers`, `growing`), the three engines that a stage's thread runs. Not here: how tokens
are computed.
"""
