"""The gRPC API: an adapter over the store."""
