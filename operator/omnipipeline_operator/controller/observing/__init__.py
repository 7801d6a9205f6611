"""The facts of one reconcile: live objects, coordinators' reports, addresses, what is missing, rivals."""
