"""Values as flat bytes: the check, the encoding, and the parts that a relay moves. No transport is known here."""
