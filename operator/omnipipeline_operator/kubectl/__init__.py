"""``kubectl omni``: what people ask of a pipeline that kubectl itself can't answer.

    cli        the commands                         offline   plan, validate, manifests: no cluster is asked
    access     runs kubectl, the only I/O           tree      a pipeline and its pods as a tree (pure)
    acting     restart, drain                       picture   plan and faults, drawn (pure)

A person's tool: kubectl's own context, namespace and credentials are used by running kubectl itself.
"""
