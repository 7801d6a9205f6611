"""The nccl relay: torch.distributed moves the bytes in worlds of two, one world for each direction of a pair."""
