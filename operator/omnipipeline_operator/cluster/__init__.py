"""The only room that talks to the API server: requests, a store of what was observed, the lease."""
