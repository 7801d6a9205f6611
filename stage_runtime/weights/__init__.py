"""Brings a pipeline's model from where it lies into a folder that processes share, and checks it there.

Here: the object store (`source`), the folder with its lock, parts and manifest (`cache`, `folders`), hashes
(`checking`), and how far it is (`progress`). Not here: loading weights (the engines), a hub's models (its own library
fetches these). Called by `cli.roles.prefetch`, which fetches, and by `processes.stages.rank`, which asks for the
folder.
"""
