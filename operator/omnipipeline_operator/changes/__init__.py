"""What differs between desired and live, in which order to change it, and what the status reports. Pure."""
