"""The gRPC API: an adapter over the store."""

import os

# Read when `grpc` is imported: its own lines come in another format, before ours that says the same and what to do.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
