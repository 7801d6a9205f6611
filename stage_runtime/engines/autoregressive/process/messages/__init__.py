"""Messages between a stage's process and its engine's, with their bytes, in both directions."""
