"""The cuda_ipc relay: tensors of a GPU are read where they lie, by another process on the same GPU."""
