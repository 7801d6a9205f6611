"""The nixl relay: bytes are written into memory that their receiver has granted, by NIXL over UCX."""
