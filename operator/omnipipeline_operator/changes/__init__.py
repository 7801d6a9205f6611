"""The differences of desired and live, the order in which to change them, and what the status reports. Pure."""
