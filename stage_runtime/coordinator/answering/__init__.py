"""A request's answer on the way to its reader: handles, order, bounds, token counts, times."""
