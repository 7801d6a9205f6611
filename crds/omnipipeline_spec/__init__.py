"""The contract between authors, the runtime and the operator: what a pipeline is, whether it is sound, what follows.

Authors import `pipeline`, `cluster`, `loading` and `planning`; those names are stable. `types` holds the values below
them, `validation` the rules, `generating` what is made from the types. `crashes` is the form of a termination message,
`operations` how commands ask for an operation of engines.
Imports the standard library, msgspec and PyYAML, and nothing of ours above it.
"""
