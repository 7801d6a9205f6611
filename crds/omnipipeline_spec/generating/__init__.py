"""Generated files: the CRD, the config reference, and a resource's YAML.

Not here: any field; all are read from the types.
"""
