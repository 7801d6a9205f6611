"""Moving one flat buffer to a peer: one folder for each relay, one line for it in `registry`."""
