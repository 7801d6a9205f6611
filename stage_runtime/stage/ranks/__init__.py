"""The ranks of a tensor-parallel stage: rank 0 leads, the others take its steps in order."""
