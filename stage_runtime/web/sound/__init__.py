"""Samples to bytes and back: reading what stages give, resampling, the formats clients ask for. Pure but for numpy."""
