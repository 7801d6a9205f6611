"""All faults of a spec at once, each with its path. `topology` is the entrance; the other modules hold the rules.

Not here: the rules that the API server checks (`generating.celrules`).
"""
