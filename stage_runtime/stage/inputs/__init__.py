"""The inputs of a stage: payloads and chunks, checked, ordered, joined, opened in the engine's thread."""
