"""Messages between the process and its coordinators: registration, membership, requests, profiles, operations."""
