"""Makes keys of blocks from prompts, and asks what the pool has of them."""
