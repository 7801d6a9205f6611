"""The relay that reaches every peer: ZeroMQ over TCP or Unix sockets."""
