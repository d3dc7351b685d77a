"""The device tier: its block pool, and copies between paged KV and slots in host memory."""
