"""What a stage receives: payloads and chunks, checked, ordered, joined, opened in the engine's thread."""
