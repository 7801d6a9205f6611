"""The tokens of a step as text, and one output for each choice of a request."""
