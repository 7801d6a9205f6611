"""``kubectl omni``: commands for pipelines that kubectl itself does not have.

    cli        the commands                         offline   plan, validate, manifests: without a cluster
    access     runs kubectl, the only I/O           tree      a pipeline and its pods as a tree (pure)
    acting     restart, drain                       picture   plan and faults, drawn (pure)
    profiling  takes a profile                      admin_routes  a coordinator's, over a port-forward

It runs kubectl itself, and so uses its context, namespace and credentials.
"""
