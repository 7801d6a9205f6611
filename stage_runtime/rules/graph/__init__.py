"""The graph as one request meets it: which stages and edges it may need, and where values go."""
