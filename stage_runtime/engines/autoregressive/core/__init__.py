"""One engine: the core carries out the scheduler's steps, the busy loop takes what comes between them.

Not here: the scheduler's rules (`rules.autoregressive`), what a step computes (`model`), who asks (`process`, `stage`).
"""
