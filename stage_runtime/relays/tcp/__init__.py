"""The relay that always works: ZeroMQ over TCP or Unix sockets."""
