"""What differs between wanted and observed, in which order to change it, and what to say of it. Pure."""
