"""A whole pipeline as processes of this machine: what `omni up` runs, and what it needs in place of a cluster."""
