"""Layers of a decoder as loops compiled for this processor, and linear layers in its fastest form. CPUs only.

`loops`, `chunk_attention`, `products`, `tiles` and `helpers` hold the compiled code: they import numba and are imported
only when `native.available`. `attention_pages`, `linears`, `fusing` and `decoder_layers` are what `loading` calls.
"""
