"""Routes of the admin port: adapters, operations, profiles."""
