"""The relay for peers on the same machine: shared memory."""
