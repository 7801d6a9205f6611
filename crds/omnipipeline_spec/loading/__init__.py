"""Reads a valid spec, with the source of each value, from a file, a text or a resource.

Not here: the rules (`validation`), writing a resource (`generating.writing`). The only package of the contract that
reads files and imports an author's modules.
"""

from omnipipeline_spec.loading.reading import Explained, LoadedPipeline, explain, from_resource, load, loads

__all__ = ["Explained", "LoadedPipeline", "explain", "from_resource", "load", "loads"]
