"""What crosses between a stage's process and its engine's: messages, their bytes, both directions."""
