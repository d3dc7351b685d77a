"""Connections: addresses, sockets with deadlines, TLS."""
