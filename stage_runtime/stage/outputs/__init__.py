"""What a stage sends: results and chunks, by the edges to its neighbours."""
