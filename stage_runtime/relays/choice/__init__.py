"""The relay of each peer: what both machines have, the choice, and what has failed since."""
