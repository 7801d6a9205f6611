"""The contract between authors, the runtime and the operator: what a pipeline is, whether it is sound, what follows.

Values (`quantities`, `pipeline`, `cluster`, `status`, `plan`), rules (`shapes`, `graph`, `placement`, `deployment`,
gathered by `topology`; `celrules` for the API server), `planning`, files (`loading`, `writing`), and what is generated
from the types (`schema`, `reference`). Imports the standard library, msgspec and PyYAML, and nothing of ours above it.
"""
