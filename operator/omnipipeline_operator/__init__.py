"""The operator: makes a pipeline's Kubernetes objects match its OmniPipeline, and reports what is.

Floors, bottom to top: errors, settings, kinds → desired (pure: plan → objects) → changes (pure: what differs, in which
order, what to report) → cluster (the only client of the API server) → controller (one reconcile: read, decide, write,
report) → handlers (what kopf calls) → cli.
It knows the contract (`omnipipeline_spec`), never the runtime (`stage_runtime`): the two meet in a pod's environment.
"""
