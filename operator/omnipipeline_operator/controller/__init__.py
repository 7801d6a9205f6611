"""One reconcile of one pipeline: take a snapshot, decide, write, report. Imports no kopf; called by `handlers`."""
