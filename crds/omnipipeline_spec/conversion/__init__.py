"""Versions of the resource and the conversion between them: a hub, whose types are this package's, and spokes.

`versions` has the table and the conversion of one object, `kept` what one version has and another lacks. Pure. Called
by the operator, which answers the API server's reviews with it.
"""
