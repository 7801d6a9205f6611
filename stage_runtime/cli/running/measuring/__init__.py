"""`omni bench`: what it sends, when, and what it makes of the answers. Pure but for `clients`."""
