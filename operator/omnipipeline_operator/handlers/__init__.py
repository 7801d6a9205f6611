"""The handlers that kopf calls, and what runs around them: lifecycle, watches, probes, metrics. Reconciling is in
`controller`.
"""
