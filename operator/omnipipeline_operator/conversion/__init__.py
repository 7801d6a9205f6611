"""Converts pipelines between versions of the resource for the API server: the conversion webhook.

`reviews` and `certificates` are pure; `serving` is the HTTPS server, `publishing` tells the API server of it. The
conversion itself is `omnipipeline_spec.conversion`. Every operator process serves, whether or not it leads.
"""
