"""What one reconcile knows: live objects, coordinators' reports, addresses, what is missing, rivals."""
