"""The outputs of a stage: results and chunks, by the edges to its neighbours."""
