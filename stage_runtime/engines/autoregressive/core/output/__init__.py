"""From a step's tokens to text, and one output for each choice of a request."""
