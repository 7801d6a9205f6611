"""The instances, and which of them a request is bound to."""
