"""The handlers of routes, one module for each path or family of paths."""
