"""One reconcile of one pipeline: read a snapshot, decide, write, report. Knows no kopf; called by `handlers`."""
